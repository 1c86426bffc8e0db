"""The test harness itself, on stock graphs: what the other tiers take for granted about checkpoints and server."""

import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import support.server
import torch
from support import processes
from support.checkpoints import CHECKPOINTS, state_dict
from support.graphs import Prompt, flux_prompt, wan_prompt
from support.server import ComfyServer
from support.server_events import PromptRejected
from torch import Tensor

JPEG = b"\xff\xd8"
I2V = partial(wan_prompt, ckpt="wan_i2v", clip_vision=True, concat_latent=True)
WAN_5B = partial(wan_prompt, ckpt="wan22_5b", channels=48)


def sample(server: ComfyServer, prompt: Prompt) -> Tensor:
    """The latent a prompt saves: finite, of sensible size, and really sampled."""
    result = server.run(prompt).check()
    assert "sampler" not in result.cached
    latent = server.latent(result)
    assert torch.isfinite(latent).all()
    assert 0.3 < latent.std() < 30
    return latent


SAMPLED: dict[str, tuple[partial[Prompt], tuple[int, ...]]] = {
    "flux": (partial(flux_prompt), (1, 16, 8, 8)),
    "flux_h1": (partial(flux_prompt, batch=2, cfg=2.0, width=72, height=56), (2, 16, 7, 9)),
    "flux_h3": (partial(flux_prompt), (1, 16, 8, 8)),
    "flux_schnell": (partial(flux_prompt, guidance=-1), (1, 16, 8, 8)),
    "flux_fp8": (partial(flux_prompt), (1, 16, 8, 8)),
    "wan_t2v": (partial(wan_prompt), (1, 16, 3, 8, 8)),
    "wan_t2v_h3": (partial(wan_prompt), (1, 16, 3, 8, 8)),
    "wan_i2v": (I2V, (1, 16, 3, 8, 8)),
    "wan22_i2v": (partial(wan_prompt, concat_latent=True), (1, 16, 3, 8, 8)),
    "wan22_5b": (WAN_5B, (1, 48, 3, 8, 8)),
    "ltxv": (partial(wan_prompt, channels=128, conditioning={"attention_mask": "text", "frame_rate": 25.0}), (1, 128, 3, 8, 8)),
    "sd3": (partial(flux_prompt), (1, 16, 8, 8)),
}


@pytest.mark.bits("the same call twice")
@pytest.mark.parametrize("ckpt", SAMPLED)
def test_every_checkpoint_samples_and_repeats_exactly(server: ComfyServer, ckpt: str) -> None:
    build, shape = SAMPLED[ckpt]
    first, again = (sample(server, build(ckpt=ckpt)) for _ in range(2))
    assert tuple(first.shape) == shape
    assert torch.equal(first, again)


def test_checkpoints_hold_exactly_what_the_models_expect(server: ComfyServer) -> None:
    for prompt in (flux_prompt(ckpt="flux_fp8"), I2V(), flux_prompt(ckpt="sd3")):
        server.run(prompt).check()
    for complaint in ("unet missing", "unet unexpected", "left over keys", "lora key not loaded"):
        assert complaint not in server.log_text()


def test_checkpoints_do_not_depend_on_anything_but_their_seed() -> None:
    first, again, other = (state_dict(CHECKPOINTS[name])[0] for name in ("wan_t2v", "wan_t2v", "wan_t2v_low"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


INPAINTED = partial(WAN_5B, latent={"noise": 1.0})
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lora": (flux_prompt, {"loras": ["flux_lora"]}),
    "lora_kohya": (flux_prompt, {"loras": [("flux_lora_kohya", 0.5)]}),
    "key_mask": (flux_prompt, {"attention_mask": "key"}),
    "bias_mask": (flux_prompt, {"attention_mask": "bias"}),
    "block_mask": (flux_prompt, {"attention_mask": "block"}),
    "reference": (flux_prompt, {"reference": {"width": 32, "height": 48}}),
    "control": (flux_prompt, {"control": {}}),
    "cfg": (flux_prompt, {"cfg": 3.0}),
    "guidance": (flux_prompt, {"guidance": 7.0}),
    "text": (flux_prompt, {"conditioning": {"seed": 101}}),
    "patch": (flux_prompt, {"model_nodes": [("TestPatch", {"kind": "patches_replace"})]}),
    "inpaint": (flux_prompt, {"latent": {"noise": 1.0, "noise_mask": "left"}}),
    "wan_lora": (wan_prompt, {"loras": ["wan_t2v_lora"]}),
    "wan_text": (wan_prompt, {"conditioning": {"seed": 101}}),
    "wan_pair": (wan_prompt, {"node": "KSamplerAdvanced", "low_ckpt": "wan_t2v_low"}),
    "wan_clip_vision": (I2V, {"clip_vision": False}),
    "wan_first_image": (I2V, {"concat_latent": False}),
    "wan22_per_frame_timesteps": (INPAINTED, {"latent": {"noise": 1.0, "noise_mask": "first_frame"}}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_changes_the_output(server: ComfyServer, option: str) -> None:
    build, changed = OPTIONS[option]
    plain, other = server.sample_once(build()), sample(server, build(**changed))
    assert (plain - other).abs().max() > 0.05 * plain.std()


@pytest.mark.bits("the same calls by another node")
@pytest.mark.parametrize("node", ["KSamplerAdvanced", "SamplerCustomAdvanced", "CPSampler"])
def test_sampler_nodes_agree(server: ComfyServer, node: Any) -> None:
    # Without a CP configuration, the graph of the CP Sampler is that of KSampler.
    assert torch.equal(sample(server, flux_prompt(cfg=2.0)), sample(server, flux_prompt(cfg=2.0, node=node)))


def test_fixed_nonce_leaves_a_repeated_prompt_in_the_cache(server: ComfyServer) -> None:
    server.run(flux_prompt(nonce=0)).check()
    assert "sampler" in server.run(flux_prompt(nonce=0)).check().cached


def test_error_of_a_node_is_reported(server: ComfyServer) -> None:
    error = server.fails(flux_prompt(conditioning={"width": 32}), "shapes cannot be multiplied")
    assert (error.node_id, error.exception_type) == ("sampler", "RuntimeError")
    assert "Traceback" in error.traceback or "File" in error.traceback


def test_invalid_prompt_is_rejected(server: ComfyServer) -> None:
    with pytest.raises(PromptRejected) as caught:
        server.queue(flux_prompt(ckpt="missing"))
    assert "loader" in caught.value.node_errors


def test_interrupt_and_events(server: ComfyServer) -> None:
    prompt_id = server.queue(flux_prompt(steps=1000))
    server.wait_event(lambda event: event.type == "progress" and event.data["prompt_id"] == prompt_id)
    server.interrupt()
    result = server.wait(prompt_id)
    assert (result.status, result.error) == ("interrupted", None)
    server.wait_event(lambda event: event.type == "execution_interrupted" and event.data["prompt_id"] == prompt_id)
    assert {"execution_start", "executing"} <= {event.type for event in server.events}


def test_free_drops_the_node_cache(server: ComfyServer) -> None:
    server.run(flux_prompt(nonce=0)).check()
    server.free_first()
    assert "loader" not in server.run(flux_prompt(nonce=0)).check().cached


def test_process_helpers(server: ComfyServer) -> None:
    assert processes.fd_count(server.pid) > 3
    assert processes.thread_count(server.pid) > 1
    for part in (processes.held(server.pid), processes.pss(server.pid)):
        assert 0 < part <= processes.rss(server.pid) * 1.01


def test_server_has_its_own_folders_and_takes_no_import_path(server: ComfyServer, checkpoints_dir: Path) -> None:
    files = server.get("/models/diffusion_models")
    folder = checkpoints_dir / "diffusion_models"
    assert sorted(files) == sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert {"TestConditioning", "TestControl", "TestLatent", "TestPatch"} <= set(server.object_info())
    assert {path.name for path in (server.base / "custom_nodes").iterdir()} >= {"comfyui-context-parallel"}


def test_options_previews_and_leftovers(comfyui_path: Path, checkpoints_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first port is one that another process has taken."""
    options = {"args": ("--preview-method", "latent2rgb"), "env": {"OMP_NUM_THREADS": "1"}}
    other = socket.create_server(("127.0.0.1", 0))
    ports = [support.server.free_port(), other.getsockname()[1]]
    monkeypatch.setattr("support.server.free_port", ports.pop)
    with other, ComfyServer(comfyui_path, models=checkpoints_dir, **options) as server:
        assert ports == []
        assert server.run({"child": {"class_type": "TestChild", "inputs": {"marker": "left_behind"}}}).status == "success"
        sample(server, flux_prompt(steps=4))
        assert server.previews()
        assert all(image.data.startswith(JPEG) for image in server.previews())
        (child,) = [each for each in processes.descendants(server.pid) if "left_behind" in processes.command_line(each)]
        (leftover,) = server.stop(grace=0.5)
        assert "left_behind" in leftover
        assert not processes.alive(child)
    assert not server.base.exists()
