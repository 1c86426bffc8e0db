"""What cannot run sharded is refused before any process starts, with a sentence that says what to do; or runs on one device."""

from functools import partial

import pytest
from support.graphs import flux_prompt, wan_prompt
from support.latents import assert_close, differ
from support.node_graphs import GraphCase, completed, node
from support.server_events import PromptRejected

from cp_runtime.words import words_in

SINGLE = {"world_size": 2, "on_unsupported": "single device"}


SETTINGS = {
    "too many ranks": ({"world_size": 64}, ["world_size", "64", "cpu"]),
    "unknown device": ({"devices": "cuda:7"}, ["devices", "cuda:7", "cpu"]),
    "shell characters": ({"devices": "cpu;reboot"}, ["devices", "cpu;reboot"]),
    "product": ({"world_size": 2, "ulysses_degree": 3}, ["3 x 1 x 1 = 3", "2"]),
    "ring": ({"world_size": 3, "ring_degree": 2}, ["1 x 2 x 1 = 2", "3"]),
    "batch": ({"world_size": 3, "batch_degree": 2}, ["1 x 2 = 2", "3"]),
    "nccl without CUDA": ({"world_size": 2, "backend": "nccl"}, ["nccl", "auto, gloo on cpu devices"]),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_bad_settings(case, off_server):
    """The queue says so, once, and in the words of the run; the run itself does where a setting comes by a link."""
    settings, words = SETTINGS[case]
    prompt = flux_prompt(cp=settings)
    with pytest.raises(PromptRejected) as rejected:
        off_server.queue(prompt)
    ((node, said),) = rejected.value.node_errors.items()
    (error,) = said["errors"]
    assert node == "cp_config"
    for word in words:
        assert word in error["details"]
    name = next(iter(settings))
    kind = "PrimitiveInt" if isinstance(settings[name], int) else "PrimitiveString"
    prompt["linked"] = {"class_type": kind, "inputs": {"value": settings[name]}}
    prompt["cp_config"]["inputs"][name] = ["linked", 0]
    at_run = off_server.fails(prompt)
    assert (at_run.node_type, at_run.exception_message.strip()) == ("CPConfig", error["details"])


@pytest.mark.parametrize(
    ("make", "name", "what"),
    [
        (flux_prompt, "width", "text embedding"),
        (flux_prompt, "pooled_width", "pooled embedding"),
        (wan_prompt, "width", "text embedding"),
    ],
    ids=["flux texts", "flux pooled", "wan texts"],
)
def test_a_text_encoder_of_another_model(make, name, what, server):
    """It is named in the place of two shapes and a traceback; the next prompt runs on the same ranks."""
    wrong, right = make(cp={"world_size": 2}), make(cp={"world_size": 2})
    wrong["positive"]["inputs"][name] = wrong["negative"]["inputs"][name] = 40
    error = server.fails(wrong, f"The text encoder does not fit the model: its {what} has width 40")
    assert "Traceback" not in error.exception_message
    pids = server.worker_pids()
    server.run(right).check()
    assert server.worker_pids() == pids


def test_errors_are_in_the_language_of_the_browser(off_server):
    """In ComfyUI's own message, of nodes that refuse, and of settings before anything runs; the status has the English, too."""
    language, words = {"client": off_server.client_id, "language": "ja"}, words_in("ja")
    for place, kind in (("model_nodes", "multigpu"), ("after_apply", "compile_alone")):
        prompt = partial(flux_prompt, cp={"world_size": 2}, **{place: [("TestPatch", {"kind": kind})]})
        english = off_server.fails(prompt()).exception_message.strip()
        off_server.post("/context_parallel/language", language)
        try:
            said = off_server.fails(prompt()).exception_message.strip()
            with pytest.raises(PromptRejected) as rejected:
                off_server.queue(flux_prompt(cp={"devices": "cuda:7"}))
        finally:
            off_server.post("/context_parallel/language", {**language, "language": "en"})
        assert said == words.error(english) != english
        last = off_server.status()["last_error"]
        assert (last["message"], last["translations"]["ja"]) == (english, said)
        (error,) = rejected.value.node_errors["cp_config"]["errors"]
        assert "使う GPU（devices）：" in error["details"]


def test_other_branches_run_beside_bad_settings(off_server):
    """As beside any node that ComfyUI finds invalid."""
    prompt = flux_prompt(cp={"devices": "cuda:7"})
    prompt["text"] = {"class_type": "PrimitiveString", "inputs": {"value": "a good branch"}}
    prompt["good"] = {"class_type": "PreviewAny", "inputs": {"source": ["text", 0]}}
    result = off_server.run(prompt).check()
    assert list(result.outputs) == ["good"]


INSIDE = {
    "attn1_output_patch": "TestPatch patched the transformer with something that cannot be sent: there is no",
    "attention_override": "attention function",
    "weight_function": "wrapped weights",
}


@pytest.mark.bits("the stock path")
@pytest.mark.parametrize("kind", INSIDE)
@pytest.mark.parametrize("place", ["model_nodes", "after_apply"])
def test_patches_inside_the_transformer_are_refused_or_run_on_a_single_device(kind, place, off_server):
    nodes = {place: [("TestPatch", {"kind": kind})]}
    error = off_server.fails(flux_prompt(cp={"world_size": 2}, **nodes), INSIDE[kind], "if a call cannot be split")
    assert error.exception_type.endswith("UnsupportedError")
    assert error.node_type == ("ApplyContextParallel" if place == "model_nodes" else "KSampler")
    expected = off_server.sample_once(flux_prompt(**nodes))
    assert (off_server.sample(flux_prompt(cp=SINGLE, **nodes)) == expected).all()
    assert "single device" in off_server.log_text()


REFUSED = [
    (flux_prompt, "multigpu", "MultiGPU CFG Split"),
    (partial(wan_prompt, ckpt="wan_i2v"), "chosen_attention", "the model file chooses attention_of_a_pack for blocks.0.self_attn"),
]
COMPILING = [
    (flux_prompt, "compile_option", "do not take option cpp.cxx='/tmp/evil'"),
    (flux_prompt, "compile_alone", "compiles the model in a way of its own"),
    (flux_prompt, ("TorchCompileModel", {"backend": "cudagraphs"}), "backend cudagraphs records what a device does"),
]
"""Nodes that may stand behind Apply Context Parallel, too."""


@pytest.mark.parametrize(
    ("place", "make", "node", "words"),
    [*(("model_nodes", *case) for case in (*REFUSED, *COMPILING)), *(("after_apply", *case) for case in COMPILING)],
)
def test_a_node_is_refused_by_its_effect(place, make, node, words, off_server):
    node = ("TestPatch", {"kind": node}) if isinstance(node, str) else node
    off_server.fails(make(cp={"world_size": 2}, **{place: [node]}), words)


@pytest.mark.bits("the stock path twice")
def test_classes_that_a_pack_changed(server):
    """The pack is named, also by a graph without a node of it; one device computes as without us."""
    plain, changed = wan_prompt(), {"model_nodes": [("TestPatch", {"kind": "class"})]}
    before = server.sample(plain)
    words = (
        "the node pack context-parallel-test-nodes replaced comfy.ldm.wan.model.WanModel.forward_orig",
        "Disable that pack",
    )
    try:
        server.fails(wan_prompt(cp={"world_size": 2}, **changed), *words, "if a call cannot be split")
        server.fails(wan_prompt(cp={"world_size": 2}), *words)
        expected = server.sample(wan_prompt())
        assert differ(expected, before)
        assert (server.sample(wan_prompt(cp=SINGLE)) == expected).all()
    finally:
        server.run(wan_prompt(model_nodes=[("TestPatch", {"kind": "class_restored"})])).check()
    assert (server.sample(wan_prompt()) == before).all()


def test_a_layer_of_a_class_that_a_node_made(server):
    """Ranks make the class from its body."""
    nodes = {"ckpt": "wan_t2v_low", "model_nodes": [("TestPatch", {"kind": "module"})]}
    server.free_first()
    expected = server.sample(wan_prompt(**nodes))
    server.free_first()
    assert_close(server.sample(wan_prompt(cp={"world_size": 2}, **nodes)), expected)
    server.free_first()


WHOLE_MODELS = {
    "another family": (
        GraphCase(
            partial(flux_prompt, ckpt="flux_schnell", guidance=-1),
            settings={"model_nodes": [node("TestPatch", kind="other_class")]},
            matters=False,
        ),
        ["OtherTransformer has no context parallel plan", "docs/generated/families.md"],
    ),
}


@pytest.mark.bits("the stock path")
@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_a_single_device_runs_refused_graphs(name, off_server):
    case, words = WHOLE_MODELS[name]

    def prompt(case=case, **settings):
        return completed(case.build(**settings), off_server)

    off_server.fails(prompt(cp={"world_size": 2}), *words)
    expected = off_server.sample(prompt())
    assert (off_server.sample(prompt(cp=SINGLE)) == expected).all()
    assert not case.matters or (off_server.sample_once(prompt(case.without())) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    "kind", ["model_function_wrapper", "diffusion_model_wrapper", "apply_model_wrapper", "post_cfg", "unknown_option"]
)
@pytest.mark.parametrize("place", ["model_nodes", "after_apply"])
def test_wrappers_around_the_denoise_call_work(kind, place, server):
    nodes = {place: [("TestPatch", {"kind": kind})]}
    expected = server.sample_once(flux_prompt(**nodes))
    assert_close(server.sample(flux_prompt(cp={"world_size": 2}, **nodes)), expected)


def test_a_controlnet_for_a_family_without_residuals(server):
    words = ("a ControlNet gave residuals of kind input and output, and Wan takes none", "Remove the ControlNet")
    server.fails(wan_prompt(control={}, cp={"world_size": 2}), *words)
    expected = server.sample(wan_prompt(control={}))
    out = server.sample(wan_prompt(control={}, cp=SINGLE))
    assert_close(out, expected)  # found out in the first call, when the weights have moved to the file
    # and back: the fallback of one prompt does not stick to the next one
    expected = server.sample(flux_prompt())
    assert_close(server.sample(flux_prompt(cp=SINGLE)), expected)


def test_uneven_shapes_are_refused_when_ulysses_anything_is_off(server):
    settings = {"world_size": 2, "ulysses_degree": 2, "ulysses_anything": False}
    server.fails(flux_prompt(tokens=13, cp=settings), "“ulysses: uneven parts” of CP Config is off")
    pids = server.worker_pids()
    server.run(flux_prompt(tokens=12, cp=settings)).check()
    assert server.worker_pids() == pids  # an error on every rank costs no restart


@pytest.mark.parametrize("kind", ["alone", "inside", "set", "bytes", "number"])
@pytest.mark.parametrize("place", ["model_nodes", "after_apply"])
def test_unread_options_are_ignored(kind, place, server):
    """Stock takes no notice of them either."""
    nodes = {place: [("TestOptions", {"kind": kind, "read": False})]}
    assert_close(server.sample(flux_prompt(cp={"world_size": 2}, **nodes)), server.sample_once(flux_prompt()))


@pytest.mark.parametrize("kind", ["alone", "inside"])
@pytest.mark.parametrize("place", ["model_nodes", "after_apply"])
def test_unsendable_options_are_refused_when_read(kind, place, server):
    """A rank finds out. It goes on with the next prompt; and one device computes with them."""
    nodes = {place: [("TestOptions", {"kind": kind, "read": True})]}
    words = ("transformer_options['rope_options']", "which cannot be sent", "if a call cannot be split")
    server.fails(flux_prompt(cp={"world_size": 2}, **nodes), *words)
    pids = server.worker_pids()
    assert_close(server.sample(flux_prompt(cp={"world_size": 2})), server.sample_once(flux_prompt()))
    assert server.worker_pids() == pids
    expected = server.sample_once(flux_prompt(**nodes))
    assert differ(expected, server.sample_once(flux_prompt()))
    assert_close(server.sample(flux_prompt(cp=SINGLE, **nodes)), expected)


def test_unsendable_conditions_are_refused(server):
    """An argument of the forward, which reads it or not: it is refused before the ranks see the call."""
    nodes = {"model_nodes": [("TestPatch", {"kind": "object_argument"})]}
    server.fails(
        flux_prompt(cp={"world_size": 2}, **nodes),
        "['own'] is a builtins.object, which cannot be sent",
        "if a call cannot be split",
    )
    assert_close(server.sample(flux_prompt(cp=SINGLE, **nodes)), server.sample_once(flux_prompt(**nodes)))
