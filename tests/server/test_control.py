"""ControlNets: the ranks compute them, each for its own tokens or items; or ComfyUI's process, and ranks take their part."""

from functools import partial
from pathlib import Path

import psutil
import pytest
from support import families
from support.graphs import family_prompt, flux_prompt
from support.latents import TOLERANCE, assert_close, differ, distance
from support.modes import in_modes
from support.node_graphs import NEGATIVE, POSITIVE, GraphCase, assert_stock, completed, node, picture, two_controlnets
from support.worlds import alternate

SIZE = {"width": 72, "height": 104}
UNEVEN = {"width": 80, "height": 112}  # 35 tokens; this kind of ControlNet takes whole patches only


SKIP_FIRST = {
    "double_layers": "0", "single_layers": "", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0, "rescaling_scale": 0.0
}  # fmt: skip


def made_up(**settings):
    """Residuals at random, another one for every block; `control` of the prompt."""
    return GraphCase(partial(flux_prompt, node="CPSampler", control={}, **settings), matters=False)


def real(*, count=1, both=True, start=0.0, end=1.0, twice=False, area=False, **settings):
    """Real ControlNets for Flux, one behind the other, on the conditioning, with ComfyUI's own nodes. `twice`: one file is loaded
    for each; `area`: they are for a part of the picture."""
    size = settings.get("width", 64), settings.get("height", 64)
    nodes = {
        "loaded": node("ControlNetLoader", control_net_name="flux_controlnet.safetensors"),
        "control_net": node("SetUnionControlNetType", control_net=["loaded", 0], type="canny/lineart/anime_lineart/mlsd"),
    }
    pair = {"positive": POSITIVE, "negative": NEGATIVE}
    for number in range(count):
        hint, applied, net = f"hint_{number}", f"applied_{number}", "control_net"
        if twice:
            net = f"loaded_{number}"
            nodes[net] = node("ControlNetLoader", control_net_name="flux_controlnet.safetensors")
        nodes[hint] = picture(*size, seed=5 + number)
        inputs = {**pair, "control_net": [net, 0], "image": [hint, 0], "strength": 0.8}
        nodes[applied] = node("ControlNetApplyAdvanced", **inputs, start_percent=start, end_percent=end)
        pair = {"positive": [applied, 0], "negative": [applied, 1]}
    if area:
        nodes["area"] = node("ConditioningSetArea", conditioning=pair["positive"], width=64, height=64, x=16, y=0, strength=1.0)
        pair["positive"] = ["area", 0]
    return GraphCase(partial(flux_prompt, node="CPSampler", **settings), nodes, pair if both else {"positive": pair["positive"]})


def around(kind):
    return {"model_nodes": [("TestAroundControl", {"kind": kind})]}


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
    "from a fifth to four fifths": real(steps=5, start=0.2, end=0.8),
    "one file loaded twice": real(count=2, twice=True, cfg=4.0),
    "with its arguments changed by a wrapper": real(**around("input_in_place")),
    "copied in a run": real(cfg=4.0, after_apply=[("TestCopiedControl", {})]),
    "deep-copied in a run": real(cfg=4.0, after_apply=[("TestCopiedControl", {"deep": True})]),
    "in an area": real(area=True, cfg=4.0, width=80, height=112),
    "compiled": real(cfg=4.0, after_apply=[("TestPatch", {"kind": "compile_eager"})]),
    "with a LoRA": real(loras=["flux_lora"]),
    # The guidance's own pass begins with whole tokens; the one residual of this ControlNet is for both blocks.
    "with the first block skipped": real(cfg=4.0, model_nodes=[("SkipLayerGuidanceDiT", SKIP_FIRST)]),
}


COUNTS = {"two in a row": 2, "one file loaded twice": 2}


def stock(server, case):
    return server.sample_once(completed(CASES[case].build(), server))


SELDOM = ("compiled", "made up with a reference", "two in a row", "deep-copied in a run", "for some of the steps")


@pytest.mark.parametrize(("case", "world"), alternate(CASES, soak=SELDOM))
def test_latent_equals_the_stock_graph(case, world, server):
    result = assert_stock(server, CASES[case], {"world_size": world})
    assert len(server.worker_pids()) == world
    assert result.report["controlnets"] == COUNTS.get(case, 0 if "made up" in case else 1)


# --- every class that has a plan: `families.controlnets`

KINDS = {
    "unet": "sd15", "unet, linear": "sdxl", "unet, pooling": "sd15", "flux image": "flux", "flux latent": "flux",
    "flux inpaint": "flux", "sd3": "sd3", "sd35": "sd3", "sd35 double": "sd3", "qwen": "qwen", "hydit": "hydit",
}  # fmt: skip
MODES = {
    "2 ranks": {"world_size": 2},
    "sharded": {"world_size": 2, "weights": "sharded"},
    "3 ranks": {"world_size": 3},
    "4 ranks": {"world_size": 4, "batch_degree": 2},
}


def two_of_kind(kind, served, **settings):
    """The graph of a family's tiny model with two ControlNets."""
    name, _, form = kind.partition(", ")
    # HunyuanDiT's ControlNet needs entries of the text that `GraphCase` leaves out.
    graph = partial(family_prompt, families.served()[served][1], steps=1, node="CPSampler") if served == "hydit" else served
    return two_controlnets(graph, name, {form: True} if form else {}, **settings)


@pytest.mark.parametrize(("mode", "kind", "served"), in_modes(list(KINDS.items()), MODES))
def test_the_ranks_compute_every_class(mode, kind, served, server, family_checkpoints):
    result = assert_stock(server, two_of_kind(kind, served, batch=3, steps=3), MODES[mode])
    assert result.report["controlnets"] == 2


def not_on_ranks(**form):
    case = two_controlnets(partial(flux_prompt, node="CPSampler"), "flux image", {"blocks": 1, **form})
    return GraphCase(case.graph, case.nodes, {"positive": case.wiring["positive"]})


PATCHED = {"model_nodes": [("TestPatch", {"kind": "innermost_for_a_call"})]}
ELSEWHERE = {
    "a node scales the residuals": (real(cfg=4.0, model_nodes=[("TestScaledControl", {})]), {}, ", as another node reads or makes"),
    "a node's class makes them": (CASES["made up"], {}, ", as the others do not run _RandomControl"),
    "in stages": (real(cfg=4.0), {"weights": "staged"}, ", as the model is in stages"),
    "in patches": (real(cfg=4.0), {"pipefusion": {"stages": 2, "patches": 1}}, ", as the model is in stages"),
    "refused in a call": (real(cfg=4.0, **PATCHED), {"on_unsupported": "single device"}, None),
    "a class without a plan": (not_on_ranks(subclass=True), {}, ", as the others do not run AdvancedControlNet"),
    "it cannot be sent": (not_on_ranks(hooked=True), {}, ": a node put a hook on"),
    "patches of its weights": (not_on_ranks(changed="patched"), {}, ", as the others do not run ControlNetFlux with patches"),
    "its own way to merge": (not_on_ranks(changed="merged"), {}, ", as the others do not run ControlNetFlux with methods of"),
    "modules of a pack": (not_on_ranks(changed="rolled"), {}, ", as the others do not run ControlNetFlux with modules of"),
    "a wrapper reads them": (real(cfg=4.0, **around("reads")), {}, ", as another node reads or makes"),
    "a wrapper copies them": (real(cfg=4.0, **around("copies")), {}, ", as another node reads or makes"),
    "a wrapper adds to them": (real(**around("adds_to")), {}, ", as another node reads or makes"),
    "a wrapper compares them": (real(**around("compares")), {}, ", as another node reads or makes"),
}  # fmt: skip


@pytest.mark.parametrize("why", ELSEWHERE)
def test_comfyui_computes_what_it_has_to_and_the_report_says_why(why, server):
    """Where the residuals are looked at, and where the ranks do not share a ControlNet."""
    case, cp, said = ELSEWHERE[why]
    settings = {name: cp[name] for name in cp if name == "pipefusion"}
    cp = {"world_size": 2, **{name: value for name, value in cp.items() if name not in settings}}
    expected = server.sample_once(completed(case.build(), server))
    prompt = completed(case.build(cp=cp, **settings), server)
    prompt["words"] = {"class_type": "CPReport", "inputs": {"report": ["sampler", 1]}}
    prompt["shown"] = {"class_type": "PreviewAny", "inputs": {"source": ["words", 0]}}
    result = server.run(prompt, timeout=240).check()
    assert_close(server.latent(result), expected)
    assert result.report.get("controlnets", 0) == 0
    spent = {each["part"]: each["seconds"] for each in server.status()["last_prompt"]["parts"]}
    assert spent["denoising"] > spent["controlnet"] > 0 or why == "refused in a call"
    assert said is None or f"ControlNets computed on one device{said}" in result.outputs["shown"]["text"][0]


@pytest.mark.parametrize("weights", ["whole", "sharded", "offloaded"])
def test_the_ranks_keep_it_as_they_keep_the_model(weights, server):
    """Blocks of which each has a part are sent; whatever it was kept as before."""
    expected, sent = server.sample_once(completed(CASES["real"].build(), server)), []
    for case in ("real", "plain"):
        graph = CASES["real"].without() if case == "plain" else CASES["real"]
        result = server.run(completed(graph.build(cp={"world_size": 2, "weights": weights}), server), timeout=240).check()
        sent.append(result.report["communication"]["bytes"])
        if case == "real":
            assert_close(server.latent(result), expected)
    assert (sent[0] - sent[1] > 5e6) == (weights != "whole"), sent


def test_the_ranks_share_its_weights(server):
    """In the host's memory they are there once, and not once per rank."""
    taken = []
    for unused in (0, 100):
        case = two_controlnets(partial(flux_prompt, node="CPSampler"), "flux image", {"unused": unused})
        prompt = completed(case.build(cp={"world_size": 3}), server)
        assert server.run(prompt, timeout=240).check().report["controlnets"] == 2
        taken.append(sum(psutil.Process(pid).memory_full_info().uss for pid in server.worker_pids()))
    assert taken[1] - taken[0] < 100e6  # of 200 MB


def test_the_ranks_drop_it_when_it_is_gone(server):
    """Another pair with every prompt: the memory of former ones is mapped no more."""
    mapped = []
    for kind in ("flux image", "flux latent", "flux inpaint", "flux image", "flux latent"):
        case = two_controlnets(partial(flux_prompt, node="CPSampler"), kind)
        assert server.run(completed(case.build(cp={"world_size": 2}), server)).check().report["controlnets"] == 2
        mapped.append(sum("/memfd:" in line for line in Path(f"/proc/{server.worker_pids()[0]}/maps").read_text().splitlines()))
    assert mapped[-1] <= mapped[1], mapped


@pytest.mark.parametrize(("kind", "graph"), [("flux image", partial(flux_prompt, node="CPSampler")), ("unet", "sd15")])
@pytest.mark.parametrize("served", ["sd15"])
def test_another_hint_for_the_same_controlnet(kind, graph, served, server, family_checkpoints):
    """The ranks keep what the layers for hints have made of the last one."""
    latents = {}
    for cp in (None, {"world_size": 2}):
        for seed in (5, 9, 5):
            case = two_controlnets(graph, kind, steps=3)
            hints = {name: picture(80, 96, seed=seed) for name in ("hint_0", "hint_1")}
            strong = {name: (cls, {**given, "strength": 8.0}) for name, (cls, given) in case.nodes.items() if "applied" in name}
            case = GraphCase(case.graph, {**case.nodes, **hints, **strong}, case.wiring, case.settings)
            latents.setdefault((cp is None, seed), []).append(server.sample(completed(case.build(cp=cp), server)))
    far = distance(latents[True, 5][0], latents[True, 9][0])
    assert far > 5 * TOLERANCE, far
    for seed in (5, 9):
        for stock, ours in zip(latents[True, seed], latents[False, seed], strict=True):
            assert_close(ours, stock)


def test_a_controlnet_that_is_changed_in_place(server):
    """The ranks get it again, also where nothing has made them drop it."""
    latents = {}
    for cp in (None, {"world_size": 2}):
        for scale in (1.0, 0.3):
            case = two_controlnets(partial(flux_prompt, node="CPSampler"), "flux image")
            nodes = {**case.nodes, "scaled": node("TestScaledNetwork", control_net=["control_net_1", 0], scale=scale)}
            nodes["applied_1"] = (nodes["applied_1"][0], {**nodes["applied_1"][1], "control_net": ["scaled", 0]})
            case = GraphCase(case.graph, nodes, case.wiring, case.settings)
            latents[cp is None, scale] = server.sample(completed(case.build(cp=cp), server))
    assert differ(latents[True, 1.0], latents[True, 0.3])
    for scale in (1.0, 0.3):
        assert_close(latents[False, scale], latents[True, scale])


def test_the_same_controlnet_on_one_device_before_and_after(server):
    case = real(cfg=4.0)
    latents = []
    for cp in (None, {"world_size": 2}, None, {"world_size": 2}):
        latents.append(server.sample(completed(case.build(cp=cp), server)))
        if cp is not None:
            server.free()
    for latent in latents[1:]:
        assert_close(latent, latents[0])


def test_control_matters(server):
    """A case that equals the graph without a ControlNet would prove nothing."""
    plain, one = server.sample_once(flux_prompt()), stock(server, "real cfg")
    assert all(differ(plain, stock(server, case)) for case in ("made up", "real"))
    assert all(differ(one, stock(server, case)) for case in ("real on the positive only", "two in a row"))


def test_a_controlnet_that_reads_the_models_weights_is_refused(server):
    """ControlLoRA and Qwen's Fun ControlNet compute with weights that are on the workers."""
    control = {"reads_weights": True}
    server.fails(
        flux_prompt(control=control, cp={"world_size": 2}), "computes with the model's own weights", "if a call cannot be split"
    )
    expected = server.sample(flux_prompt(control=control), timeout=120)
    alone = flux_prompt(control=control, cp={"world_size": 2, "on_unsupported": "single device"})
    assert_close(server.sample(alone, timeout=120), expected, 1e-5)
    # The next run, without it, is back on the workers.
    assert_close(server.sample(flux_prompt(cp={"world_size": 2}), timeout=120), server.sample(flux_prompt(), timeout=120))
    assert len(server.worker_pids()) == 2
