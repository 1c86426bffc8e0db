"""ControlNets: they run in ComfyUI's process, their residuals are added on the ranks, each rank taking its own tokens."""

from __future__ import annotations

from functools import partial

import pytest
from support.graphs import flux_prompt
from support.worlds import alternate

TOLERANCE = 2e-4
SIZE = {"width": 72, "height": 104}
UNEVEN = {"width": 80, "height": 112}  # 35 tokens; this kind of ControlNet takes whole patches only


def with_controlnet(prompt, *, count=1, both=True, size=(64, 64), **settings):
    """Put `count` real ControlNets for Flux, one behind the other, on the conditioning, with ComfyUI's own nodes."""
    width, height = size
    prompt["loader_control"] = {"class_type": "ControlNetLoader", "inputs": {"control_net_name": "flux_controlnet.safetensors"}}
    prompt["typed"] = {
        "class_type": "SetUnionControlNetType",
        "inputs": {"control_net": ["loader_control", 0], "type": "canny/lineart/anime_lineart/mlsd"},
    }
    positive, negative = ["positive", 0], ["negative", 0]
    for i in range(count):
        prompt[f"hint{i}"] = {"class_type": "TestImage", "inputs": {"seed": 5 + i, "width": width, "height": height, "frames": 1}}
        inputs = {"strength": 0.8, "start_percent": 0.0, "end_percent": 1.0, **settings}
        prompt[f"apply{i}"] = {
            "class_type": "ControlNetApplyAdvanced",
            "inputs": {
                **inputs, "positive": positive, "negative": negative, "control_net": ["typed", 0], "image": [f"hint{i}", 0]
            },
        }  # fmt: skip
        positive, negative = [f"apply{i}", 0], [f"apply{i}", 1]
    prompt["sampler"]["inputs"]["positive"] = positive
    if both:
        prompt["sampler"]["inputs"]["negative"] = negative
    return prompt


SKIP_FIRST = {
    "double_layers": "0", "single_layers": "", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0, "rescaling_scale": 0.0
}  # fmt: skip


def made_up(**settings):
    """Residuals at random, another one for every block; `control` of the prompt."""
    return partial(flux_prompt, control={}, **settings)


def real(*, count=1, both=True, control=None, **settings):
    size = settings.get("width", 64), settings.get("height", 64)
    return lambda cp=None: with_controlnet(flux_prompt(cp=cp, **settings), count=count, both=both, size=size, **(control or {}))


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
    "for some of the steps": real(steps=4, control={"end_percent": 0.5}),
    "with a LoRA": real(loras=["flux_lora"]),
    # The guidance's own pass begins with whole tokens; the one residual of this ControlNet is for both blocks.
    "with the first block skipped": real(cfg=4.0, model_nodes=[("SkipLayerGuidanceDiT", SKIP_FIRST)]),
}


@pytest.mark.parametrize(("case", "world"), alternate(CASES))
def test_latent_equals_the_stock_graph(case, world, server):
    expected = server.sample_once(CASES[case]())
    out = server.sample(CASES[case](cp={"world_size": world}), timeout=120)
    assert len(server.worker_pids()) == world
    assert expected.std() > 1e-2
    assert (out - expected).abs().max() <= TOLERANCE * expected.std()


def test_control_matters(server):
    """A case that equals the graph without a ControlNet would prove nothing."""
    plain = server.sample(flux_prompt())
    for case in ("made up", "real"):
        assert (server.sample_once(CASES[case]()) - plain).abs().max() > 1e-2 * plain.std(), case
    one = server.sample_once(CASES["real cfg"]())
    for case in ("real on the positive only", "two in a row"):
        assert (server.sample_once(CASES[case]()) - one).abs().max() > 1e-2 * one.std(), case


def test_a_controlnet_that_reads_the_models_weights_is_refused(server):
    """ControlLoRA and Qwen's Fun ControlNet compute with weights that are on the workers."""
    control = {"reads_weights": True}
    result = server.run(flux_prompt(control=control, cp={"world_size": 2}), timeout=120)
    assert result.status == "error"
    assert "computes with the model's own weights" in result.error.exception_message
    assert "on_unsupported" in result.error.exception_message
    expected = server.sample(flux_prompt(control=control), timeout=120)
    alone = flux_prompt(control=control, cp={"world_size": 2, "on_unsupported": "single device"})
    assert (server.sample(alone, timeout=120) - expected).abs().max() <= 1e-5 * expected.std()
    # The next run, without it, is back on the workers.
    out = server.sample(flux_prompt(cp={"world_size": 2}), timeout=120)
    stock = server.sample(flux_prompt(), timeout=120)
    assert (out - stock).abs().max() <= TOLERANCE * stock.std()
    assert len(server.worker_pids()) == 2
