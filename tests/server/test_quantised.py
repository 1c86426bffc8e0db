"""Quantised weights: every rank reads them from the file, and the latent is the one of the stock graph.

Where ComfyUI turns quantised weights back into floats, only rounding differs, as in test_parity.py. Where it rounds
*activations* to 8 bits while it runs (int8 everywhere, fp8 on devices that multiply fp8), a last bit of a float now and then
decides between two neighbouring 8-bit values, and the difference grows to a share of the error of the quantisation itself. One
process does the same against itself when it only changes its attention function, so a tighter bound would measure luck; the
latent must stay as near to the unquantised one as the stock latent is.
"""

import pytest
import torch
from support.graphs import flux_prompt, wan_prompt
from support.latents import assert_close
from support.server import ComfyServer
from support.worlds import alternate, on_ranks

MATTERS = 1e-3

FLUX, WAN = flux_prompt, wan_prompt
LORA = {"loras": ["flux_lora"]}
GUIDED = {"cfg": 4.0, "batch": 2}
CHECKPOINT = "flux_fp8_checkpoint"


def load_checkpoint(**options):
    """A Flux graph that begins with Load Checkpoint."""
    prompt = flux_prompt(**options)
    prompt["loader"] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": f"{CHECKPOINT}.safetensors"}}
    return prompt


# graph, settings of the quantised one, settings that it shares with the one it is compared with
WEIGHTS_ONLY = {
    "plain fp8 file": (FLUX, {"ckpt": "flux_fp8_plain"}, {}),
    "plain fp8 file kept fp8 LoRA": (FLUX, {"ckpt": "flux_fp8_plain", "weight_dtype": "fp8_e4m3fn"}, LORA),
    "weight_dtype fp8_e4m3fn": (FLUX, {"weight_dtype": "fp8_e4m3fn"}, GUIDED),
    "weight_dtype fp8_e4m3fn_fast": (FLUX, {"weight_dtype": "fp8_e4m3fn_fast"}, {}),
    "weight_dtype fp8_e5m2": (FLUX, {"weight_dtype": "fp8_e5m2"}, LORA),
    "weight_dtype on a scaled file": (FLUX, {"ckpt": "flux_fp8", "weight_dtype": "fp8_e4m3fn"}, {}),
    "fp8 LoRA": (FLUX, {"ckpt": "flux_fp8"}, {**LORA, **GUIDED}),
    "fp8 scaled": (FLUX, {"ckpt": "flux_fp8_scaled"}, {}),
    "fp8 mixed LoRA": (FLUX, {"ckpt": "flux_fp8_mixed"}, LORA),
    "mxfp8 LoRA": (FLUX, {"ckpt": "flux_mxfp8"}, LORA),
    "nvfp4": (FLUX, {"ckpt": "flux_nvfp4"}, {}),
    "nvfp4 LoRA": (FLUX, {"ckpt": "flux_nvfp4"}, {**LORA, **GUIDED}),
    "Load Checkpoint": (load_checkpoint, {"ckpt": CHECKPOINT}, {}),
    "wan fp8 scaled LoRA": (WAN, {"ckpt": "wan_t2v_fp8_scaled"}, {"cfg": 4.0, "loras": ["wan_t2v_lora"]}),
}
INT8 = {
    "int8 convrot": (FLUX, {"ckpt": "flux_int8_convrot"}, {}),
    "int8 convrot LoRA": (FLUX, {"ckpt": "flux_int8_convrot"}, {**LORA, **GUIDED}),
}
# On a server that is told that its device multiplies fp8. A CPU does not: ComfyUI then multiplies the rounded operands as floats.
NATIVE_FP8 = {
    "fp8": (FLUX, {"ckpt": "flux_fp8"}, {}),
    "fp8 scaled, with scales of the inputs": (FLUX, {"ckpt": "flux_fp8_scaled"}, {}),
    "weight_dtype fp8_e4m3fn_fast": (FLUX, {"weight_dtype": "fp8_e4m3fn_fast"}, {}),
    "fp8 LoRA": (FLUX, {"ckpt": "flux_fp8"}, {**LORA, **GUIDED}),
}


class Runs:
    """Latents of one server."""

    def __init__(self, server):
        self.server, self.compiled = server, {}

    def latents(self, case, world, **nodes):
        """(unquantised, stock, sharded with `nodes`), after a check that every rank loaded the file and took part. What the report
        says about compiled blocks is in `compiled`."""
        build, quantised, shared = case
        plain = {"ckpt": "wan_t2v" if build is WAN else "flux"}
        exact = self.server.sample_once((WAN if build is WAN else FLUX)(**plain, **shared))
        stock = self.server.sample_once(build(**{**plain, **quantised}, **shared))
        prompt = build(node="CPSampler", cp={"world_size": world}, **{**plain, **quantised}, **shared, **nodes)
        result = self.server.run(prompt, timeout=120).check()
        report = result.report
        ranks, self.compiled = report["ranks"], report["compiled"]
        assert [rank["pid"] for rank in ranks] == self.server.worker_pids()
        assert len(ranks) == world
        file = quantised.get("ckpt", plain["ckpt"])
        assert all(f"[rank {rank}] loading {file}.safetensors" in self.server.log_text() for rank in range(world))
        out = self.server.latent(result)
        assert out.shape == stock.shape
        return exact, stock, out


@pytest.fixture(scope="session")
def runs(server):
    return Runs(server)


@pytest.fixture(scope="module")
def native_fp8_runs(comfyui_path, checkpoints_dir):
    with ComfyServer(comfyui_path, models=checkpoints_dir, args=["--supports-fp8-compute"]) as server:
        yield Runs(server)


@pytest.mark.parametrize(("case", "world"), alternate(WEIGHTS_ONLY))
def test_latent_equals_the_stock_graph(case, world, runs):
    exact, stock, out = runs.latents(WEIGHTS_ONLY[case], world)
    assert (stock - exact).abs().max() > MATTERS * exact.std()
    assert_close(out, stock)


@pytest.mark.parametrize(("case", "world"), alternate(INT8))
def test_int8_is_as_near_to_the_unquantised_latent_as_stock(case, world, runs):
    check_rounded_activations(*runs.latents(INT8[case], world))


@pytest.mark.parametrize(
    ("case", "world"),
    [on_ranks(2, case, id=case, soak=True) for case in ("plain fp8 file kept fp8 LoRA", "nvfp4", "int8 convrot")],
)
def test_blocks_with_quantised_weights_are_compiled(case, world, runs):
    nodes = {"after_apply": [("TestPatch", {"kind": "compile_eager"})]}
    exact, stock, out = runs.latents((WEIGHTS_ONLY | INT8)[case], world, **nodes)
    assert (runs.compiled["kinds"], runs.compiled["left"]) == ({"DoubleStreamBlock": 2, "SingleStreamBlock": 2}, {})
    if case in INT8:
        check_rounded_activations(exact, stock, out)
    else:
        assert_close(out, stock)


@pytest.mark.parametrize("case", NATIVE_FP8)
def test_native_fp8_is_as_near_to_the_unquantised_latent_as_stock(case, native_fp8_runs):
    check_rounded_activations(*native_fp8_runs.latents(NATIVE_FP8[case], 2))


def check_rounded_activations(exact, stock, out):
    error = rms(stock - exact)
    assert error > MATTERS * exact.std()
    assert rms(out - stock) <= error
    assert rms(out - exact) <= 1.2 * error


def rms(difference):
    return difference.square().mean().sqrt()


def test_one_process_with_other_last_bits_differs_as_much(server):
    """What the bound for rounded activations rests on: a CFG scale whose float is another, nothing else."""
    usual, changed = (
        [server.sample(flux_prompt(ckpt=ckpt, cfg=cfg)) for ckpt in ("flux", "flux_int8_convrot")] for cfg in (4.0, 4.00001)
    )
    unquantised, int8 = (rms(a - b) / a.std() for a, b in zip(usual, changed, strict=True))
    assert unquantised < 1e-5 < int8, (unquantised, int8)


QUANTISERS = {
    "TensorWiseINT8Layout": {"is_weight": False},
    "TensorCoreMXFP8Layout": {},
    "TensorCoreFP8Layout": {"scale": torch.tensor(1.0)},
    "TensorCoreNVFP4Layout": {"scale": torch.tensor(0.01)},
}


@pytest.mark.bits("every token by itself, no product")
@pytest.mark.parametrize("layout", QUANTISERS)
def test_activations_are_rounded_token_by_token(layout):
    """So a rank that holds some tokens rounds them as one process does that holds them all."""
    tensor = pytest.importorskip("comfy_kitchen.tensor").QuantizedTensor
    tokens = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 64)[:, None]

    def rounded(some):
        return tensor.from_float(some, layout, **QUANTISERS[layout]).dequantize()

    assert torch.equal(torch.cat([rounded(tokens[:32]), rounded(tokens[32:])]), rounded(tokens))
    assert not torch.equal(rounded(tokens), tokens)
