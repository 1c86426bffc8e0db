"""Weights with patches, on a real server: in which weights they are, how long, and what ComfyUI's process reads of them.

Every form of patch in every placement: tests/ranks/weights/test_patched.py.
"""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import CHECKPOINTS, random_tensor
from support.graphs import MODEL, flux_prompt, sampling_prompt, wan_prompt
from support.latents import assert_close, differ
from support.node_graphs import BOTH, IMAGE, NEGATIVE, POSITIVE, GraphCase, codec, completed, node, picture

CP = {"world_size": 2}
SD3_LATENT = {"batch": 1, "channels": 16, "frames": 0, "height": 8, "width": 8}
SINGLE = {**CP, "on_unsupported": "single device"}
REFUSED, REFUSED_BY_WAN = (("TestPatch", {"kind": kind}) for kind in ("attn1_output_patch", "attn2_patch"))
REFUSED_IN_A_CALL = ("TestPatch", {"kind": "innermost_for_a_call"})


@pytest.fixture(scope="module")
def loras(checkpoints_dir):
    """LoRA files of kinds that `support.checkpoints` does not write: with a change of weights that ComfyUI leaves as they are, of
    one that it reads, and for control images in the format of Black Forest Labs, which makes the input layer wider."""
    inits = {init.name: init for name in ("wan_t2v", "flux") for init in CHECKPOINTS[name].architecture.tensors()}

    def like(name):
        return random_tensor(inits[name], seed=5)

    def low_rank(name, out_dim, in_dim, rank=4):
        draw = torch.Generator().manual_seed(out_dim)
        up, down = (torch.randn(shape, generator=draw) for shape in ((out_dim, rank), (rank, in_dim)))
        up = {"weight": 0.2 * up / in_dim**0.5, "bias": like(f"{name}.bias")}
        return {f"{name}.lora_A.weight": down, **{f"{name}.lora_B.{kind}": tensor for kind, tensor in up.items()}}

    inits |= {init.name: init for init in CHECKPOINTS["sd3"].architecture.tensors()}
    norms = [f"single_blocks.{i}.norm.{kind}_norm.scale" for i in range(2) for kind in ("query", "key")]
    files = {
        "wan_diff": {
            "diffusion_model.blocks.0.modulation.diff": like("blocks.0.modulation"),
            "diffusion_model.head.modulation.diff": like("head.modulation"),
            "diffusion_model.blocks.1.norm3.diff": like("blocks.1.norm3.weight"),
            "diffusion_model.blocks.1.norm3.diff_b": like("blocks.1.norm3.bias"),
            "diffusion_model.blocks.0.ffn.0.diff_b": like("blocks.0.ffn.0.bias"),
            "diffusion_model.blocks.0.self_attn.norm_q.set_weight": like("blocks.0.self_attn.norm_q.weight"),
        },
        "sd3_embedder": {"diffusion_model.x_embedder.proj.diff": like("x_embedder.proj.weight")},
        "flux_control": {
            **low_rank("img_in", 256, 128),
            **low_rank("double_blocks.0.img_mlp.0", 1024, 256),
            **low_rank("single_blocks.1.linear2", 256, 1280),
            **{name: like(name) for name in norms},
        },
    }
    for name, tensors in files.items():
        save_file(tensors, checkpoints_dir / "loras" / f"{name}.safetensors")


def check(server, case, cp=CP, other=None):
    """Check that ranks give the stock latent. `other`: a graph that must give another one."""
    expected = server.sample_once(completed(case.build(), server), timeout=120)
    assert_close(server.sample(completed(case.build(cp=cp), server), timeout=120), expected)
    if other is not None:
        assert differ(expected, server.sample_once(completed(other.build(), server), timeout=120))


# --- what is loaded computes ------------------------------------------------------------------------------------------

WITH_LORA, SCALED = {"loras": ["flux_lora"]}, {"ckpt": "flux_fp8_scaled"}
BYPASSED = [("LoraLoaderBypassModelOnly", {"lora_name": "flux_lora.safetensors", "strength_model": 0.7})]
LOADED = [
    ("clone_to_sample", WITH_LORA, "after_apply"),
    ("clone_to_sample", SCALED, "model_nodes"),
    ("clone_to_sample", {**SCALED, **WITH_LORA}, "after_apply"),
    ("changed_clone_to_sample", WITH_LORA, "model_nodes"),
]


@pytest.mark.parametrize(
    ("weights", "ckpt", "place"),
    [
        ("whole", "flux", "after_apply"),
        ("sharded", "flux", "model_nodes"),
        ("staged", "flux", "model_nodes"),
        ("whole", "flux_fp8_scaled", "model_nodes"),
    ],
)
def test_a_lora_beside_the_weights(weights, ckpt, place, server):
    """Its layers are injected around the model's."""
    case, other = (partial(flux_prompt, ckpt=ckpt, **given) for given in ({place: BYPASSED}, {}))
    expected, plain = server.sample_once(case()), server.sample_once(other())
    assert differ(expected, plain)
    for graph, latent in ((case, expected), (other, plain)):
        assert_close(server.sample(graph(cp={**CP, "weights": weights})), latent)


@pytest.mark.parametrize(("kind", "weights", "place"), LOADED, ids=lambda each: each if isinstance(each, str) else " ".join(each))
def test_what_was_loaded_last_computes(place, weights, kind, server):
    """As in ComfyUI, whose weights stay as a clone has patched them when that is gone."""
    check(server, GraphCase(partial(flux_prompt, **weights), settings={place: [("TestPatch", {"kind": kind})]}))


def test_a_model_that_is_unloaded_in_the_middle_of_a_run(server):
    """It is loaded again. ComfyUI computes with weights on the host then, without their patches."""
    graph = partial(flux_prompt, **SCALED, **WITH_LORA)
    expected = server.sample_once(graph())
    assert_close(server.sample(graph(cp=CP, after_apply=[("TestPatch", {"kind": "unload_while_sampling"})])), expected)


@pytest.mark.parametrize("refused", [REFUSED, REFUSED_IN_A_CALL], ids=["before a run", "in a call"])
def test_a_clone_that_is_gone_computes_on_one_device(refused, server):
    nodes = [("TestPatch", {"kind": "changed_clone_to_sample"}), refused]
    graph = partial(flux_prompt, loras=["flux_lora"])
    one, other = (GraphCase(graph, settings={"after_apply": each}) for each in (nodes, nodes[1:]))
    check(server, one, SINGLE, other)
    check(server, GraphCase(graph))


# --- which weights are patched, and their shapes ----------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["whole", "sharded", "single device"])
def test_weights_that_comfyui_leaves_as_they_are(weights, server, loras):
    """Parameters of modules with modules inside, as Wan's modulation, which some LoRA files have a change for."""
    graph = partial(wan_prompt, loras=["wan_diff"])
    if weights == "single device":
        check(server, GraphCase(graph, settings={"after_apply": [REFUSED_BY_WAN]}), SINGLE)
    else:
        check(server, GraphCase(graph), {**CP, "weights": weights}, GraphCase(wan_prompt))


def test_weights_that_comfyui_s_process_reads(server, loras):
    """As ControlNets for SD3.5 do."""
    graph = partial(sampling_prompt, ckpt="sd3", latent=SD3_LATENT, conditioning={"tokens": 12, "width": 64, "pooled_width": 64})
    nodes = {"after_apply": [("TestPatch", {"kind": "reads_embedder"})]}
    check(server, GraphCase(partial(graph, loras=["sd3_embedder"]), settings=nodes), CP, GraphCase(graph, settings=nodes))


CONTROL = {
    "vae": codec(16, time=0),
    "image": picture(64, 64),
    "node": node("InstructPixToPixConditioning", positive=POSITIVE, negative=NEGATIVE, pixels=IMAGE),
}


@pytest.mark.parametrize("weights", ["whole", "sharded", "offloaded", "in a call on a single device"])
def test_lora_for_control_images(weights, server, loras):
    """As in the template flux_depth_lora_example. Without it, and without context parallelism, the input layer is as it was."""
    graph = partial(flux_prompt, cfg=4.0)
    case = GraphCase(partial(graph, loras=["flux_control"]), CONTROL, BOTH)
    if weights == "in a call on a single device":
        case = GraphCase(case.graph, CONTROL, BOTH, {"after_apply": [REFUSED_IN_A_CALL]})
        check(server, case, SINGLE)
    else:
        check(server, case, {**CP, "weights": weights})
    prompts = [completed(GraphCase(graph, **nodes).build(cp=cp), server) for nodes in ({}, {}) for cp in (None, CP)]
    one, *others = [server.sample(prompt) for prompt in prompts]
    for other in others:
        assert_close(other, one)


@pytest.mark.bits("ComfyUI's own patching on the same processor")
def test_a_patched_model_is_saved_once_patched(server, loras):
    """ComfyUI's process has some of its weights patched already."""
    saved = []
    for name, cp in (("stock", None), ("ranks", CP)):
        prompt = flux_prompt(loras=["flux_control", "flux_lora"], cp=cp)
        inputs = {"model": prompt["sampler"]["inputs"]["model"], "filename_prefix": f"saved/{name}"}
        server.run({**prompt, "save_model": {"class_type": "ModelSave", "inputs": inputs}}, timeout=120).check()
        saved.append(load_file(server.base / "output" / "saved" / f"{name}_00001_.safetensors"))
    stock, ours = saved
    assert stock["model.diffusion_model.img_in.weight"].shape == (256, 128)
    assert {name for name in stock if not torch.equal(stock[name], ours[name])} == stock.keys() ^ ours.keys() == set()


# --- merges -----------------------------------------------------------------------------------------------------------

OTHER = {"other": node("UNETLoader", unet_name="wan_t2v_low.safetensors", weight_dtype="default")}
WITH_OTHER = {"model1": MODEL, "model2": ["other", 0]}
LORA = {"lora_name": "wan_t2v_lora.safetensors", "strength_model": 0.8}
NESTED = {
    **OTHER,
    "patched": node("LoraLoaderModelOnly", model=["other", 0], **LORA),
    "inner": node("ModelMergeSimple", model1=["patched", 0], model2=["other", 0], ratio=0.4),
}
MERGES = {
    "ModelMergeSimple": [node("ModelMergeSimple", **WITH_OTHER, ratio=0.5)],
    "ModelMergeSimple, the other one first": [node("ModelMergeSimple", model1=["other", 0], model2=MODEL, ratio=0.3)],
    "ModelMergeBlocks": [node("ModelMergeBlocks", **WITH_OTHER, input=0.3, middle=0.6, out=0.9)],
    "ModelMergeAdd": [node("ModelMergeAdd", **WITH_OTHER)],
    "ModelMergeSubtract": [node("ModelMergeSubtract", **WITH_OTHER, multiplier=0.4)],
    "ModelMergeWAN2_1": [node("ModelMergeWAN2_1", **WITH_OTHER, **{"blocks.0.": 0.2, "blocks.1.": 0.7, "patch_embedding.": 0.5})],
    "a merge of merges, between LoRAs": [
        node("LoraLoaderModelOnly", model=MODEL, **LORA),
        node("ModelMergeSimple", model1=MODEL, model2=["inner", 0], ratio=0.5),
        node("ModelMergeSubtract", **WITH_OTHER, multiplier=-0.3),
        node("LoraLoaderModelOnly", model=MODEL, **LORA),
    ],
}


@pytest.mark.parametrize(
    ("name", "place", "weights"),
    [(name, ("model_nodes", "after_apply")[i % 2], ("whole", "sharded")[i // 2 % 2]) for i, name in enumerate(MERGES)]
    + [("a merge of merges, between LoRAs", "after_apply", "offloaded"), ("ModelMergeSimple", "model_nodes", "single device")],
)
def test_merge(name, place, weights, server):
    settings = {place: MERGES[name]}
    if weights == "single device":
        check(server, GraphCase(wan_prompt, NESTED, settings={**settings, "after_apply": [REFUSED_BY_WAN]}), SINGLE)
    else:
        check(server, GraphCase(wan_prompt, NESTED, settings=settings), {**CP, "weights": weights}, GraphCase(wan_prompt))


# --- weight hooks: weights that change from one half of CFG to the other, and from step to step ------------------------


def hooks(strength=1.0, name="hook", lora="flux_lora"):
    return {name: node("CreateHookLoraModelOnly", lora_name=f"{lora}.safetensors", strength_model=strength)}


FADING = {
    "frames": node(
        "CreateHookKeyframesInterpolated",
        strength_start=1.0, strength_end=0.2, interpolation="linear", start_percent=0.0, end_percent=1.0, keyframes_count=3,
    ),
    "faded": node("SetHookKeyframes", hooks=["hook", 0], hook_kf=["frames", 0]),
}  # fmt: skip
HOOKED = node("ConditioningSetProperties", cond_NEW=POSITIVE, hooks=["hook", 0])
OTHER_HOOKED = node("ConditioningSetProperties", cond_NEW=NEGATIVE, hooks=["other", 0])
GUIDED = partial(flux_prompt, cfg=3.0, steps=4)
HOOKS = {
    "one half": GraphCase(GUIDED, hooks() | {"hooked": HOOKED}, {"positive": ["hooked", 0]}),
    "a strength for each half": GraphCase(
        GUIDED,
        hooks() | hooks(-0.5, "other") | {"hooked": HOOKED, "other_hooked": OTHER_HOOKED},
        {"positive": ["hooked", 0], "negative": ["other_hooked", 0]},
    ),
    "keyframes": GraphCase(
        partial(flux_prompt, steps=4),
        hooks() | FADING | {"hooked": node("ConditioningSetProperties", cond_NEW=POSITIVE, hooks=["faded", 0])},
        {"positive": ["hooked", 0]},
    ),
    "beside a LoRA": GraphCase(
        GUIDED, hooks(0.7) | {"hooked": HOOKED}, {"positive": ["hooked", 0]}, settings={"loras": ["flux_lora"]}
    ),
}


@pytest.mark.parametrize("case", HOOKS)
@pytest.mark.parametrize("weights", ["whole", "sharded"])
def test_weight_hooks(case, weights, server):
    check(server, HOOKS[case], {**CP, "weights": weights}, HOOKS[case].without())
    plain = GraphCase(flux_prompt, matters=False)  # nothing of them is left
    check(server, plain, {**CP, "weights": weights})


def test_a_callback_at_load_changes_the_model_of_the_ranks_as_well(server):
    case = GraphCase(flux_prompt, settings={"model_nodes": [("TestPatch", {"kind": "on_load"})]})
    server.free_first()
    expected = server.sample(case.build())
    server.free_first()
    assert_close(server.sample(case.build(cp=CP)), expected)
    server.free_first()
    assert differ(expected, server.sample(flux_prompt()))
