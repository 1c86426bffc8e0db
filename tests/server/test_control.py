"""ControlNets: they run in ComfyUI's process, their residuals are added on the ranks, each rank taking its own tokens."""

from functools import partial

import pytest
from support.graphs import flux_prompt
from support.latents import assert_close, differ
from support.node_graphs import NEGATIVE, POSITIVE, GraphCase, assert_stock, completed, node, picture
from support.worlds import alternate

SIZE = {"width": 72, "height": 104}
UNEVEN = {"width": 80, "height": 112}  # 35 tokens; this kind of ControlNet takes whole patches only


SKIP_FIRST = {
    "double_layers": "0", "single_layers": "", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0, "rescaling_scale": 0.0
}  # fmt: skip


def made_up(**settings):
    """Residuals at random, another one for every block; `control` of the prompt."""
    return GraphCase(partial(flux_prompt, control={}, **settings), matters=False)


def real(*, count=1, both=True, end=1.0, **settings):
    """Real ControlNets for Flux, one behind the other, on the conditioning, with ComfyUI's own nodes."""
    size = settings.get("width", 64), settings.get("height", 64)
    nodes = {
        "loaded": node("ControlNetLoader", control_net_name="flux_controlnet.safetensors"),
        "control_net": node("SetUnionControlNetType", control_net=["loaded", 0], type="canny/lineart/anime_lineart/mlsd"),
    }
    pair = {"positive": POSITIVE, "negative": NEGATIVE}
    for number in range(count):
        hint, applied = f"hint_{number}", f"applied_{number}"
        nodes[hint] = picture(*size, seed=5 + number)
        nodes[applied] = node("ControlNetApplyAdvanced", **pair, image=[hint, 0], strength=0.8, end_percent=end)
        pair = {"positive": [applied, 0], "negative": [applied, 1]}
    return GraphCase(partial(flux_prompt, **settings), nodes, pair if both else {"positive": pair["positive"]})


CASES = {
    "made up": made_up(),
    "made up odd size batch 2": made_up(batch=2, tokens=13, **SIZE),
    "made up, positive only": made_up(cfg=4.0),
    "made up with a reference": made_up(reference={"width": 32, "height": 48}),
    "real": real(),
    "real cfg": real(cfg=4.0),
    "real cfg batch 2 uneven": real(cfg=4.0, batch=2, tokens=13, **UNEVEN),
    "real on the positive only": real(cfg=4.0, both=False),
    "two in a row": real(count=2, cfg=4.0),
    "for some of the steps": real(steps=4, end=0.5),
    "with a LoRA": real(loras=["flux_lora"]),
    # The guidance's own pass begins with whole tokens; the one residual of this ControlNet is for both blocks.
    "with the first block skipped": real(cfg=4.0, model_nodes=[("SkipLayerGuidanceDiT", SKIP_FIRST)]),
}


def stock(server, case):
    return server.sample_once(completed(CASES[case].build(), server))


@pytest.mark.parametrize(("case", "world"), alternate(CASES))
def test_latent_equals_the_stock_graph(case, world, server):
    assert_stock(server, CASES[case], {"world_size": world})
    assert len(server.worker_pids()) == world


def test_control_matters(server):
    """A case that equals the graph without a ControlNet would prove nothing."""
    plain, one = server.sample_once(flux_prompt()), stock(server, "real cfg")
    assert all(differ(plain, stock(server, case)) for case in ("made up", "real"))
    assert all(differ(one, stock(server, case)) for case in ("real on the positive only", "two in a row"))


def test_a_controlnet_that_reads_the_models_weights_is_refused(server):
    """ControlLoRA and Qwen's Fun ControlNet compute with weights that are on the workers."""
    control = {"reads_weights": True}
    server.fails(flux_prompt(control=control, cp={"world_size": 2}), "computes with the model's own weights", "on_unsupported")
    expected = server.sample(flux_prompt(control=control), timeout=120)
    alone = flux_prompt(control=control, cp={"world_size": 2, "on_unsupported": "single device"})
    assert_close(server.sample(alone, timeout=120), expected, 1e-5)
    # The next run, without it, is back on the workers.
    assert_close(server.sample(flux_prompt(cp={"world_size": 2}), timeout=120), server.sample(flux_prompt(), timeout=120))
    assert len(server.worker_pids()) == 2
