"""Nodes that put code into the forward: what the ranks rebuild gives the stock latent, the rest is refused by name."""

from functools import partial
from typing import Any

import pytest
import torch
from support import families
from support.graphs import GUIDED_FLUX, NodeSpec, Prompt, family_prompt, flux_prompt, wan_prompt
from support.latents import assert_close, differ
from support.node_graphs import IMAGE, NodeCase, assert_stock, completed, node, picture
from support.worlds import on_ranks

from cp_runtime.errors import ON_ONE_DEVICE


def family(name: str, **settings: Any) -> partial[Prompt]:
    _, entry, _ = families.served()[name]
    return partial(family_prompt, entry, **settings)


def network(kind: str, **others: NodeSpec) -> dict[str, NodeSpec]:
    """Nodes that a model patch node takes something from, by the names of its inputs."""
    return {"model_patch": node("TestModelPatch", kind=kind, seed=3), "image": picture(80, 72), "vae": VAE, **others}


VAE, VIDEO_VAE = (node("TestVae", seed=2, video=video) for video in (False, True))
QWEN_NET = network("qwen", vae=VIDEO_VAE)
MULTI_TALK = network("multitalk")
LAYERS = {"double_layers": "1", "single_layers": "0, 1", "start_percent": 0.0, "end_percent": 1.0}
SKIPPED = {**LAYERS, "scale": 3.0}
FREE_U = {"b1": 1.3, "b2": 1.4, "s1": 0.5, "s2": 0.2}
SHRINK = {"block_number": 1, "end_percent": 1.0, "upscale_method": "bilinear"}
RADIANCE = {"start_sigma": 1.0, "nerf_tile_size": 0, "force_sequential_txt_ids": True}
ODD_FLUX = {"width": 72, "height": 104, "tokens": 13}
WAN_160 = partial(wan_prompt, ckpt="wan_160", width=72, height=56)
WAN_72 = partial(wan_prompt, width=72, height=56)
AWAY = {"away": node("TestConditioning", seed=300, tokens=16, width=64)}
GUIDANCE = {
    "conditioning": ["away", 0], "nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5, "input_type": "default", "inplace": False,
}  # fmt: skip
INSIDE_WAN = [
    ("WanVideoNAG", GUIDANCE),
    ("WanVideoEnhanceAVideoKJ", {"latent": ["latent", 0], "weight": 4.0}),
    ("WanChunkFeedForward", {"chunks": 2, "dim_threshold": 8}),
    ("ApplyRifleXRoPE_WanVideo", {"latent": ["latent", 0], "k": 2}),
]
UNET = family("sd15", cfg=4.0, batch=2)

MIRRORED = {
    "SkipLayerGuidanceDiT": NodeCase("SkipLayerGuidanceDiT", {**SKIPPED, "rescaling_scale": 0.5}),
    "SkipLayerGuidanceDiT odd size batch 2": NodeCase("SkipLayerGuidanceDiT", SKIPPED, partial(GUIDED_FLUX, batch=2, **ODD_FLUX)),
    "SkipLayerGuidanceDiTSimple": NodeCase("SkipLayerGuidanceDiTSimple", LAYERS),
    "SkipLayerGuidanceDiT without a block that splits": NodeCase(
        "SkipLayerGuidanceDiT", {**SKIPPED, "double_layers": "0, 1", "single_layers": ""}
    ),
    "SkipLayerGuidanceDiT without any block": NodeCase("SkipLayerGuidanceDiT", {**SKIPPED, "double_layers": "0, 1"}),
    "SkipLayerGuidanceSD3": NodeCase(
        "SkipLayerGuidanceSD3",
        {"layers": "0", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0},
        family("sd3", cfg=4.0),
        served="sd3",
    ),
    "NAGuidance": NodeCase("NAGuidance", {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}, partial(GUIDED_FLUX, batch=2)),
    "ChromaRadianceOptions": NodeCase("ChromaRadianceOptions", RADIANCE, family("chroma_radiance"), served="chroma_radiance"),
    "UNetSelfAttentionMultiply": NodeCase("UNetSelfAttentionMultiply", {"q": 1.3, "k": 0.7, "v": 1.2, "out": 0.8}, UNET),
    "PerturbedAttentionGuidance": NodeCase("PerturbedAttentionGuidance", {"scale": 3.0}, UNET),
    "FreeU": NodeCase("FreeU", FREE_U, UNET),
    "FreeU_V2": NodeCase("FreeU_V2", FREE_U, UNET),
    "PatchModelAddDownscale": NodeCase("PatchModelAddDownscale", SHRINK, UNET),
    "PatchModelAddDownscale before the skip": NodeCase("PatchModelAddDownscale", {**SHRINK, "downscale_after_skip": False}, UNET),
    "USOStyleReference": NodeCase(
        "USOStyleReference", {"clip_vision_output": ["model_patch", 1]}, partial(flux_prompt, **ODD_FLUX), network("uso")
    ),
    "QwenImageDiffsynthControlnet": NodeCase(
        "QwenImageDiffsynthControlnet", {"strength": 3.0}, family("qwen", cfg=4.0), QWEN_NET, served="qwen"
    ),
    "QwenImageDiffsynthControlnet with references": NodeCase(
        "QwenImageDiffsynthControlnet", {"strength": 3.0}, family("qwen edit"), QWEN_NET, served="qwen edit"
    ),
    "ZImageFunControlnet": NodeCase(
        "ZImageFunControlnet", {"strength": 3.0, "image": IMAGE}, family("z-image", cfg=4.0), network("z-image"), served="z-image"
    ),
    "ZImageFunControlnet, first version": NodeCase(
        "ZImageFunControlnet",
        {"strength": 3.0, "image": IMAGE},
        family("z-image", batch=1),
        network("z-image first version"),
        served="z-image",
    ),
    "WanUni3CControlnetApply": NodeCase(
        "WanUni3CControlnetApply",
        {"render_video": IMAGE, "strength": 3.0},
        partial(wan_prompt, cfg=4.0, width=72, height=56),
        network("uni3c", vae=VIDEO_VAE),
    ),
    "AnimaLLLiteApply": NodeCase(
        "AnimaLLLiteApply", {"strength": 3.0}, family("cosmos predict2", cfg=4.0), network("lllite"), served="cosmos predict2"
    ),
    "WanVideoNAG": NodeCase("WanVideoNAG", GUIDANCE, WAN_72, AWAY),
    "WanVideoNAG, half of a batch": NodeCase("WanVideoNAG", {**GUIDANCE, "inplace": True}, partial(WAN_72, cfg=4.0, batch=2), AWAY),
    "WanVideoNAG, a batch": NodeCase("WanVideoNAG", {**GUIDANCE, "input_type": "batch"}, partial(WAN_72, batch=2), AWAY),
    "WanVideoNAG, from an image": NodeCase(
        "WanVideoNAG", GUIDANCE, partial(WAN_72, ckpt="wan_i2v", cfg=4.0, clip_vision=True, concat_latent=True), AWAY
    ),
    "WanVideoEnhanceAVideoKJ": NodeCase("WanVideoEnhanceAVideoKJ", {"weight": 4.0}, partial(WAN_72, cfg=4.0, batch=2)),
    "WanVideoEnhanceAVideoKJ, one head to three ranks": NodeCase(
        "WanVideoEnhanceAVideoKJ", {"weight": 4.0}, partial(WAN_72, frames=5)
    ),
    "WanChunkFeedForward": NodeCase(
        "WanChunkFeedForward", {"chunks": 3, "dim_threshold": 8}, partial(WAN_72, cfg=4.0), matters=False
    ),
    "ApplyRifleXRoPE_WanVideo": NodeCase("ApplyRifleXRoPE_WanVideo", {"k": 2}, partial(WAN_72, cfg=4.0)),
    "another field": NodeCase("TestOtherVersion", {"kind": "another field"}, wan_prompt, matters=False),
    "another module": NodeCase("TestOtherVersion", {"kind": "another module"}, wan_prompt),
    "InfiniteTalk": NodeCase("TestMultiTalk", {"speakers": 1}, WAN_160, MULTI_TALK),
    "InfiniteTalk, two speakers": NodeCase("TestMultiTalk", {"speakers": 2}, WAN_160, MULTI_TALK),
}

AGAIN = ("ApplyContextParallel", {"cp_config": ["cp_config", 0]})


def latent(server, prompt):
    return server.sample(completed(prompt, server), timeout=120, node_id="save")


PLACES = {"model_nodes": 0, "after_apply": 1}
"""Before Apply Context Parallel, with a batch axis, and behind it, without one."""


@pytest.mark.parametrize(
    ("name", "served", "place", "world"),
    [
        on_ranks(2 + i % 2, name, case.served, place, id=f"{name}-{place}-{2 + i % 2} ranks", soak=turn != i // 2 % 2)
        for i, (name, case) in enumerate(MIRRORED.items())
        for turn, place in enumerate(PLACES)
    ],
)
def test_mirrored_patch(name, served, place, world, server, family_checkpoints):
    assert_stock(server, MIRRORED[name].at(place), {"world_size": world, "batch_degree": PLACES[place]})


IN_BLOCKS = {
    "ring, sharded": {"ring_degree": 2, "weights": "sharded"},
    "staged": {"weights": "staged"},
    "exchanged in rounds": {"ulysses_degree": 2, "weights": "offloaded"},
}


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=pytest.mark.ranks(2)) for mode in IN_BLOCKS])
def test_several_forwards_inside_of_wan(mode, server):
    """On ranks, and gone where the next prompt has none."""
    settings = {"world_size": 2, **IN_BLOCKS[mode]}
    graph = partial(WAN_72, cfg=4.0, others=AWAY)
    expected, plain = (server.sample_once(graph(model_nodes=nodes)) for nodes in (INSIDE_WAN, []))
    assert_close(latent(server, graph(cp=settings, model_nodes=INSIDE_WAN)), expected)
    assert_close(latent(server, graph(cp=settings)), plain)
    assert differ(expected, plain)


def test_forwards_inside_of_compiled_blocks(server):
    graph = partial(WAN_72, others=AWAY, cp={"world_size": 2})
    expected = server.sample_once(WAN_72(others=AWAY, model_nodes=INSIDE_WAN))
    plain = server.sample_once(WAN_72(others=AWAY))
    for nodes, stock in ((COMPILED, plain), ([*COMPILED, *INSIDE_WAN], expected), (COMPILED, plain)):
        assert_close(latent(server, graph(model_nodes=nodes)), stock)


ATTENTION = {  # other functions than the one that ComfyUI takes on a CPU
    "as a pack sets it": {"kind": "backend", "name": "pytorch"},
    "past ComfyUI's wrapper": {"kind": "per model", "name": "pytorch"},
}


COMPILED = [("TestPatch", {"kind": "compile_eager"})]


@pytest.mark.parametrize(
    ("name", "served", "prompt", "nodes", "world"),
    [
        on_ranks(2, name, "sd15", prompt, nodes, id=f"{name}{way}", soak=nodes and name != "as a pack sets it")
        for name in ATTENTION
        # One kind of block: to compile two takes twice as long.
        for way, prompt, nodes in (("", flux_prompt, []), (", compiled", wan_prompt, COMPILED))
    ],
)
def test_attention_that_a_node_chose(name, served, prompt, nodes, world, server, family_checkpoints):
    """The functions round differently; each does so alike every time."""
    node, graph = ("TestAttention", ATTENTION[name]), partial(prompt, width=72, tokens=13)
    expected = latent(server, graph(model_nodes=[node]))
    cp = {"world_size": world, "ulysses_degree": world}
    default, out = (latent(server, graph(cp=cp, after_apply=[*chosen, *nodes])) for chosen in ([], [node]))
    assert_close(out, expected)
    assert not torch.equal(out, default)


@pytest.mark.parametrize("graph", [flux_prompt, wan_prompt])
def test_a_forward_for_the_time_of_a_call(graph, server):
    """Of Flux the inner one, which the workers run; of Wan the outer one, around what they run."""
    nodes = {"after_apply": [("TestPatch", {"kind": "for_a_call"})]}
    expected = latent(server, graph(**nodes))
    assert_close(latent(server, graph(cp={"world_size": 2}, **nodes)), expected)
    assert differ(expected, latent(server, graph()))


def test_comfyui_s_compiler_records_no_call_of_the_workers(server):
    nodes = {"model_nodes": [("TestPatch", {"kind": "recorded"})]}
    expected, out = (latent(server, flux_prompt(**graph)) for graph in ({}, {"cp": {"world_size": 2}, **nodes}))
    assert_close(out, expected)
    server.fails(flux_prompt(**nodes), "aimdo memory compile error")


def test_blocks_that_the_compiler_cannot_take(server, family_checkpoints):
    """Because of what a patch does inside of them. The prompt ends, or they run as they are on all ranks; nothing runs twice."""
    case = MIRRORED["InfiniteTalk, two speakers"]
    expected, before = latent(server, case.at("after_apply").build()), len(server.log_text())
    nodes = {"after_apply": [(case.node, case.inputs), ("TestPatch", {"kind": "compile_eager"})], "others": case.others}
    remedy = f"{ON_ONE_DEVICE}: such blocks then run as they are"
    for _ in range(2):
        prompt = completed(case.graph(cp={"world_size": 2}, **nodes), server)
        server.fails(prompt, "torch.compile (backend eager) cannot compile WanAttentionBlock: ", remedy, timeout=120)
    pids = server.worker_pids()
    for _ in range(2):
        prompt = case.graph(cp={"world_size": 2, "on_unsupported": "single device"}, node="CPSampler", **nodes)
        result = server.run(completed(prompt, server), timeout=120).check()
        assert_close(server.latent(result, "save"), expected)
        assert list(result.report["compiled"]["left"]) == ["WanAttentionBlock"]
    assert server.worker_pids() == pids
    assert server.log_text()[before:].count("blocks of kind WanAttentionBlock run as they are") == 1


REFUSED = {
    "FluxKVCache": (NodeCase("FluxKVCache"), ["Flux KV Cache", "earlier steps"]),
    "HyperTile": (
        NodeCase("HyperTile", {"tile_size": 256, "swap_size": 2, "max_depth": 0, "scale_depth": False}, UNET),
        ["HyperTile", "random"],
    ),
    "TomePatchModel": (NodeCase("TomePatchModel", {"ratio": 0.3}, UNET), ["TomePatchModel", "random"]),
    "SelfAttentionGuidance": (
        NodeCase("SelfAttentionGuidance", {"scale": 0.5, "blur_sigma": 2.0}, UNET),
        ["Self-Attention Guidance", "attention scores"],
    ),
    "a node of another pack": (
        NodeCase("TestPatch", {"kind": "attn1_output_patch"}),
        ["TestPatch patched the transformer with something that cannot be sent: there is no"],
    ),
    "another closure": (NodeCase("TestOtherVersion", {"kind": "another closure"}, wan_prompt), ["no code is sent to the workers"]),
    "another place": (
        NodeCase("TestOtherVersion", {"kind": "another place"}, wan_prompt),
        [
            "TestOtherVersion patched the transformer, and that fails on the workers: ",
            "blocks.0.cross_attn.forward) raised TypeError",
        ],
    ),
    "another helper": (
        NodeCase("TestOtherVersion", {"kind": "another helper"}, wan_prompt),
        ["patched the transformer with something that cannot be sent", "no code is sent to the workers"],
    ),
    "attention of a pack's own": (
        NodeCase("TestAttention", {"kind": "with a condition", "name": "pytorch"}),
        ["replaced the attention function by one of its own", "Patch Sage Attention KJ"],
    ),
    "sparse attention": (
        NodeCase("TestAttention", {"kind": "sparse", "name": "pytorch"}),
        ["BlockSparseAttention replaced the attention function by one of its own", "a version of ComfyUI that this extension"],
    ),
    "sparse attention of MiniMax-H3": (
        NodeCase("TestPatch", {"kind": "sparse_block"}),
        ["BlockSparseAttention", "cannot be sent", "nodes_sparse_attention"],
    ),
    "attention that needs a GPU": (
        NodeCase("TestAttention", {"kind": "sage", "name": "sageattn_qk_int8_pv_fp8_cuda++"}),
        [
            "a node of comfyui-kjnodes chose the attention function SageAttention (sageattn_qk_int8_pv_fp8_cuda++)",
            "does not run on cpu",
        ],
    ),
}


@pytest.mark.parametrize("place", ["model_nodes", "after_apply"])
@pytest.mark.parametrize(("name", "served"), [(name, "sd15") for name in REFUSED], ids=REFUSED)
def test_refused_by_name(name, served, place, server, family_checkpoints):
    case, words = REFUSED[name]
    server.fails(
        completed(case.at(place).build(cp={"world_size": 2}), server), *words, "Remove that node", "if a call cannot be split"
    )


CHANGED = {"class_of_a_network": "SigLIPMultiFeatProjModel.forward", "class_of_a_patch": "UsoStyleProjectorPatch.__call__"}


def test_classes_of_a_patch_that_a_pack_changed(server):
    """The ranks import them as they are, as they do the model's."""
    case = MIRRORED["USOStyleReference"]
    for kind, method in CHANGED.items():
        nodes = [(case.node, case.inputs), ("TestPatch", {"kind": kind})]
        prompt = completed(case.graph(cp={"world_size": 2}, model_nodes=nodes, others=case.others), server)
        try:
            said = server.fails(prompt, "the node pack context-parallel-test-nodes replaced", "Disable that pack")
            assert f"nodes_model_patch.{method}" in said.exception_message
        finally:
            server.run(flux_prompt(model_nodes=[("TestPatch", {"kind": "class_restored"})])).check()
    assert_stock(server, case.at("model_nodes"), {"world_size": 2})


TITLES = {
    "in front": ("WanVideoNAG", "My chunks (TestOtherVersion) patched the transformer, and that fails on the workers"),
    "twice": ("TestOtherVersion", "TestOtherVersion patched the transformer, and that fails on the workers"),
}


@pytest.mark.parametrize("case", TITLES)
def test_a_refusal_has_the_title_of_the_node_where_that_is_certain(case, server):
    (other, words), kind = TITLES[case], {"kind": "another place"}
    nodes = [(other, GUIDANCE if other == "WanVideoNAG" else kind), ("TestOtherVersion", kind)]
    prompt = completed(wan_prompt(cp={"world_size": 2}, after_apply=nodes, others=AWAY), server)
    for each in prompt.values():
        if each["class_type"] == "TestOtherVersion":
            each["_meta"] = {"title": "My chunks"}
    assert words in server.fails(prompt).exception_message


def test_enhancement_needs_all_tokens_at_once(server):
    prompt = wan_prompt(cp={"world_size": 2}, pipefusion={"patches": 2}, model_nodes=INSIDE_WAN, others=AWAY)
    server.fails(completed(prompt, server), "WanVideoEnhanceAVideoKJ needs all tokens at once", "Set patches of CP PipeFusion to 1")


def test_a_second_apply_context_parallel_changes_nothing(server):
    expected, out = (latent(server, flux_prompt(**graph)) for graph in ({}, {"cp": {"world_size": 2}, "after_apply": [AGAIN]}))
    assert_close(out, expected)
    assert len(server.worker_pids()) == 2
