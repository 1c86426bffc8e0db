"""CP VAE Decode and CP VAE Encode on a real server, against ComfyUI's own nodes."""

import time

import pytest
from support.graphs import Graph, wan_prompt
from support.vae_graphs import vae_prompt
from support.worlds import on_ranks

BOUND = 1e-5  # relative, float32
EXACT = ("wan", "ltxv", "kl")
STATUS = "context_parallel.status"


def run(server, *args, **kwargs):
    return server.sample(vae_prompt(*args, **kwargs))


def difference(ours, stock):
    assert ours.shape == stock.shape
    return float((ours - stock).abs().max() / stock.abs().max())


TINY = ("wan", "ltxv", "kl", "taesd", "taehv")
METHODS = [(name, method) for name in TINY for method in ("decode", "encode") if (name, method) != ("kl", "encode")]
SELDOM = [("ltxv", "decode"), ("taesd", "decode"), *((name, "encode") for name in ("wan", "ltxv", "taesd"))]  # others are in tiles


@pytest.mark.usefixtures("vae_files")
class TestVAE:
    @pytest.mark.parametrize(("name", "method", "world"), [on_ranks(2 + i % 3, *m) for i, m in enumerate(METHODS) if m[0] in EXACT])
    def test_exact_is_the_stock_result(self, server, name, method, world):
        stock = run(server, name, method)
        assert difference(run(server, name, method, "auto", world=world), stock) <= BOUND

    @pytest.mark.bits("the same tiles, blended by the same node")
    @pytest.mark.parametrize(
        ("name", "method", "world"), [on_ranks(4 - i % 3, *m, soak=m in SELDOM) for i, m in enumerate(METHODS)]
    )
    def test_tiles_are_bit_equal_to_the_stock_tiled_node(self, server, name, method, world):
        stock = run(server, name, method, "tiled")
        assert (run(server, name, method, "tiles", world=world) == stock).all()

    @pytest.mark.parametrize("world", [on_ranks(2), on_ranks(4)])
    def test_a_batch_is_shared_out(self, server, world):
        stock = run(server, "kl", "decode", batch=2)
        assert difference(run(server, "kl", "decode", "exact", world=world, batch=2), stock) <= BOUND
        degrees = server.status()["last_vae_call"]["degrees"]
        assert degrees == {"rows": world // 2, "batch": 2}
        (spent,) = (each for each in server.status()["last_prompt"]["parts"] if each["part"] == "vae")
        assert spent["seconds"] == spent["on_all"] > 0

    @pytest.mark.parametrize("world", [on_ranks(2)])
    def test_from_text_to_picture_on_the_same_ranks(self, server, world):
        """Without a CP Config of its own, it runs where the model was sampled."""

        def graph(kind, **cp):
            prompt = wan_prompt(**cp)
            graph = Graph()
            graph.prompt = prompt
            vae = graph.add("vae", "VAELoader", vae_name="wan_vae.safetensors")
            mode = {"mode": "auto"} if cp else {}
            picture = graph.add("run", kind, samples=["sampler", 0], vae=vae, **mode)
            graph.add("kept", "SaveLatent", samples=graph.add("picture", "TestPicture", image=picture), filename_prefix="vae")
            graph.add("image", "SaveImage", images=picture, filename_prefix="vae")
            return prompt

        stock = server.sample(graph("VAEDecode"), node_id="kept")
        ranked = graph("CPVAEDecode", cp={"world_size": world})
        result = server.run(ranked).check()
        assert difference(server.latent(result, "kept"), stock) <= 1e-4  # the latent was sampled on ranks as well
        assert len(result.outputs["image"]["images"]) == 9
        status = server.status()
        assert {"wan_vae.safetensors", "wan_t2v.safetensors"} <= set(status["models"])
        assert status["last_vae_call"]["degrees"] == {"rows": 2, "batch": 1}
        assert status["last_call"]["degrees"].keys() == {"batch", "ring", "ulysses"}

        # The next run does not open with what the VAE took, and the VAE not with what the run took.
        before = {call["seconds"] for call in (status["last_call"], status["last_vae_call"])} | {
            status["speed"]["seconds_per_call"]
        }
        since = time.monotonic()
        ranked["sampler"]["inputs"] |= {"seed": 7, "steps": 40}
        server.run(ranked).check()
        said = [event.data for event in server.events if event.time >= since and event.type == STATUS]
        paces = [now for now in said if now["pace"] is not None]
        assert paces
        assert not {now["pace"] for now in paces} & before
        for now in paces:
            assert now["pace"] == (now["speed"]["seconds_per_call"] or now["last_call"]["seconds"])
            assert now["speed"]["parts"]["ranks"] == 2

    @pytest.mark.bits("the same tiles, blended by the same node")
    @pytest.mark.parametrize("world", [on_ranks(2)])
    @pytest.mark.parametrize("video", [False, True])
    def test_a_vae_without_a_file(self, server, world, video):
        """A node has made it in memory."""

        def made(mode, **settings):
            prompt = vae_prompt("taehv" if video else "taesd", "decode", mode, **settings)
            prompt["vae"] = {"class_type": "TestVae", "inputs": {"seed": 1, "channels": 16 if video else 4, "video": video}}
            return server.sample(prompt)

        assert (made("tiles", world=world) == made("tiled")).all()

    @pytest.mark.bits("the stock path")
    @pytest.mark.parametrize("world", [on_ranks(2)])
    def test_what_cannot_run_is_refused_by_name(self, server, world):
        server.fails(vae_prompt("taesd", "decode", "exact"), "TAESD has no plan for mode exact", "Set mode to tiles")
        prompt = vae_prompt("taesd", "decode", "tiles")
        prompt["vae"] = {"class_type": "TestVae", "inputs": {"seed": 1, "channels": 4, "video": False, "own_tiles": True}}
        for mode in ("auto", "tiles"):
            prompt["run"]["inputs"]["mode"] = mode
            server.fails(prompt, "TAESD cuts tiles by itself, which the ranks cannot share. Use VAE Decode")
        single = vae_prompt("taesd", "decode", "exact", on_unsupported="single device")
        stock = run(server, "taesd", "decode")
        assert (server.sample(single) == stock).all()


@pytest.mark.usefixtures("vae_files")
def test_a_decoder_that_draws_noise_runs_on_one_device(server):
    """Every rank would draw its own. An encoder draws none."""
    before = server.log_text()
    run(server, "ltxv_noise", "decode", "auto")
    assert "the VAE runs on one device: this LTXV VAE draws noise while it decodes" in server.log_text()[len(before) :]
    for mode in ("exact", "tiles"):
        server.fails(vae_prompt("ltxv_noise", "decode", mode), "draws noise while it decodes", "Set mode to auto")
    assert (run(server, "ltxv_noise", "encode", "tiles") == run(server, "ltxv_noise", "encode", "tiled")).all()
