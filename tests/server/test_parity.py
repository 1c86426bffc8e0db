"""Real server, real queue: the latent computed by several ranks equals the one of the stock graph.

Tolerance: 2e-4 of the standard deviation of the stock latent, float32 (docs/numerics.md).
"""

from functools import partial

import pytest
from support.graphs import flux_prompt, wan_prompt
from support.latents import assert_close, differ
from support.node_graphs import GraphCase, assert_stock
from support.worlds import alternate

FLUX, WAN = flux_prompt, wan_prompt
CASES = {
    # every sampler node
    "KSampler euler": partial(FLUX, node="KSampler", sampler="euler"),
    "KSamplerAdvanced dpmpp_2m": partial(FLUX, node="KSamplerAdvanced", sampler="dpmpp_2m", steps=3),
    "SamplerCustomAdvanced cfg": partial(FLUX, node="SamplerCustomAdvanced", cfg=4.0),
    "CPSampler cfg": partial(FLUX, node="CPSampler", cfg=4.0, denoise=0.7, latent={"noise": 1.0}),
    # every kind of sampler
    "ancestral": partial(FLUX, sampler="euler_ancestral", steps=4),
    "SDE": partial(FLUX, sampler="dpmpp_sde", steps=3),
    # CFG, batch, sizes, text lengths
    "cfg 4 batch 2": partial(FLUX, cfg=4.0, batch=2),
    "odd size": partial(FLUX, width=72, height=104, tokens=13),
    "one text token": partial(FLUX, tokens=1),
    "different text lengths": partial(FLUX, tokens=7, negative={"tokens": 10}, cfg=4.0),
    "inpaint mask": partial(FLUX, latent={"noise": 1.0, "noise_mask": "left"}),
    # heads
    "1 head": partial(FLUX, ckpt="flux_h1"),
    "3 heads": partial(FLUX, ckpt="flux_h3", width=72),
    "no guidance embedding": partial(FLUX, ckpt="flux_schnell", guidance=-1),
    # masks, references
    "key mask": partial(FLUX, attention_mask="key", tokens=13),
    "block mask batch 2": partial(FLUX, attention_mask="block", batch=2),
    "reference latents": partial(FLUX, reference={"width": 40, "height": 56, "reference_count": 2}),
    # weights
    "LoRA": partial(FLUX, loras=["flux_lora"]),
    "two LoRAs": partial(FLUX, loras=[("flux_lora", 0.7), ("flux_lora_kohya", -0.4)]),
    "LoRA after Apply": partial(FLUX, loras=[("flux_lora", 0.5)], apply_after_lora=False),
    "fp8 scaled LoRA": partial(FLUX, ckpt="flux_fp8", loras=["flux_lora"]),
    # Wan
    "wan t2v cfg batch odd": partial(WAN, width=72, height=56, frames=5, tokens=15, batch=2, cfg=4.0),
    "wan i2v clip": partial(WAN, ckpt="wan_i2v", clip_vision=True, concat_latent=True, cfg=4.0),
    "wan per-frame timesteps": partial(WAN, ckpt="wan22_5b", channels=48, latent={"noise": 1.0, "noise_mask": "first_frame"}),
    "wan high and low noise": partial(WAN, node="KSamplerAdvanced", low_ckpt="wan_t2v_low", steps=4, cfg=4.0),
}  # fmt: skip


@pytest.mark.parametrize(("case", "world"), alternate(CASES))
def test_latent_equals_the_stock_graph(case, world, server):
    assert_stock(server, GraphCase(CASES[case], matters=False), {"world_size": world})
    assert len(server.worker_pids()) == world


# Degrees left open are chosen by the cost model; here are all the others.
MODES = {
    "ulysses": {"world_size": 3, "ulysses_degree": 3},
    "ring alltoall": {"world_size": 3, "ring_degree": 3, "rotate_method": "alltoall"},
    "ring allgather": {"world_size": 3, "ring_degree": 3, "rotate_method": "allgather"},
    "unified": {"world_size": 4, "ring_degree": 2, "rotate_method": "alltoall", "convert_to_fp32": False},
    "batch": {"world_size": 4, "batch_degree": 2, "ulysses_degree": 2},
}


QUICK = "cfg 4 batch 2"
DIFFICULT = ("odd size", "one text token", "1 head", "key mask", "block mask batch 2", "wan t2v cfg batch odd")
# One case in every mode, the others in one: tests/ranks has the families in every mode.
RUNS = [
    pytest.param(case, mode, settings["world_size"], id=f"{mode}-{case}", marks=[pytest.mark.ranks(settings["world_size"]), *marks])
    for turn, (case, marks) in enumerate([(QUICK, [pytest.mark.quick]), *((case, []) for case in DIFFICULT)])
    for place, (mode, settings) in enumerate(MODES.items())
    if case == QUICK or (turn + place) % len(MODES) == 0
]


@pytest.mark.parametrize(("case", "mode", "world"), RUNS)
def test_every_mode_equals_the_stock_graph(case, mode, world, server):
    assert_stock(server, GraphCase(CASES[case], matters=False), MODES[mode])
    assert len(server.worker_pids()) == world


def test_conditions_of_the_cases_matter(server):
    """A case that equals the plain graph would prove nothing."""
    plain = server.sample_once(CASES["KSampler euler"]())
    for case in ("key mask", "LoRA", "reference latents", "fp8 scaled LoRA", "ancestral"):
        other = server.sample_once(CASES[case]())
        assert differ(plain, other), case


@pytest.mark.bits("the stock path")
def test_world_of_one_is_bit_identical(server):
    expected = server.sample(flux_prompt(steps=3, cfg=4.0))
    out = server.sample(flux_prompt(steps=3, cfg=4.0, cp={"world_size": 1}))
    assert (out == expected).all()


def test_report_of_cp_sampler(server):
    result = server.run(flux_prompt(node="CPSampler", steps=3, cp={"world_size": 2, "ulysses_degree": 2})).check()
    report = result.report
    assert report["world_size"] == 2
    assert report["degrees"] == {"ulysses": 2, "ring": 1, "batch": 1}
    communication = report["communication"]
    # 4 attentions of 28 tokens, 256 channels, float32: 4 (U - 1) / U^2 of that; and the gathered output, 16 tokens of 64 channels
    assert communication["predicted_bytes"] == 4 * 28 * 256 * 4
    assert communication["bytes"] == communication["predicted_bytes"] + 8 * 64 * 4
    assert communication["seconds"] > 0
    assert communication["predicted_seconds"] > 0
    assert report["family"] == "Flux"
    assert (report["steps"], report["calls"]) == (3, 3)
    assert 0 < report["seconds_per_step"] <= report["seconds"]
    assert 0 < report["communication_share"] < 1
    assert [rank["tokens"] for rank in report["ranks"]] == [{"txt": 6, "img": 8}] * 2
    assert [rank["pid"] for rank in report["ranks"]] == sorted(server.worker_pids())
    assert all(rank["host_memory"] > 2**20 for rank in report["ranks"])


@pytest.mark.parametrize(("settings", "allowed"), [({"ring_degree": 2}, [(2, 1)]), ({}, [(1, 2), (2, 1)])])
def test_report_names_the_degrees_of_the_run(settings, allowed, server):
    result = server.run(flux_prompt(node="CPSampler", cp={"world_size": 2, **settings})).check()
    degrees = result.report["degrees"]
    assert (degrees["ring"], degrees["ulysses"]) in allowed


def test_cp_sampler_takes_a_config_of_its_own(server):
    expected = server.sample(flux_prompt())
    assert_close(server.sample(flux_prompt(node="CPSampler", sampler_has_config=True, cp={"world_size": 2})), expected)
