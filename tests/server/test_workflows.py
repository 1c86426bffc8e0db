"""The workflows in `workflows/`: they load without gaps, their API twins are the same graphs, and both run.

A twin in `workflows/api/` is what the browser sends when the workflow of that name is queued. It lies in a folder of its
own because ComfyUI offers every JSON file directly in `workflows/` as a template. Beside a template lies the picture that
the browser shows for it, by its name.
"""

import itertools
import json
from dataclasses import replace
from urllib.parse import quote

import pytest
from support import checkpoints, families, gguf_files
from support.graphs import cp_config
from support.latents import assert_close, differ
from support.server import CHECKOUT, PACK, ComfyServer
from support.server_events import PromptRejected
from support.workflows import NOTES, Json, node_inputs, outputs_of, real_nodes, slots_of, to_prompt, widget_values

FOLDER = CHECKOUT / "workflows"
NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))
OWN_NODES = {"CPConfig", "ApplyContextParallel", "CPSampler", "CPVAEDecode", "CPUpscaleImage"}
PACKS = dict.fromkeys(OWN_NODES, PACK) | {"UnetLoaderGGUF": "comfyui-gguf"}
"""Nodes that are not ComfyUI's, and the pack of each in ComfyUI's registry, where the Manager looks for what is missing."""


FILE_INPUTS = {"ckpt_name", "unet_name", "clip_name", "clip_name1", "clip_name2", "vae_name", "control_net_name", "model_name"}
MOVED = {"SaveVideo": "0.31.0"}
"""Nodes with other inputs from that version of ComfyUI on, which takes the old ones as well: tests/browser opens them."""


def nodes_as_saved(workflow: Json) -> list[Json]:
    """Those that have the inputs of the version with which the workflow was saved."""
    moved = {name for name, since in MOVED.items() if families.exists(since)}
    return [node for node in real_nodes(workflow) if node["type"] not in moved]


def load(name: str, folder: str = ".") -> Json:
    return json.loads((FOLDER / folder / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def workflow(name):
    return load(name)


def test_templates_of_the_pack(server):
    """The browser is offered the workflows and not their API twins."""
    assert sorted(server.get("/workflow_templates")[PACK]) == NAMES
    for template in NAMES:
        assert server.get(f"/api/workflow_templates/{PACK}/{quote(template)}.json") == load(template)


def test_every_workflow_has_a_twin_and_a_picture():
    assert NAMES
    assert sorted(file.relative_to(FOLDER).as_posix() for file in FOLDER.rglob("*.json")) == sorted(
        [f"{name}.json" for name in NAMES] + [f"api/{name}.json" for name in NAMES]
    )
    assert sorted(file.stem for file in FOLDER.glob("*.jpg")) == NAMES


def test_nodes(workflow, info):
    ids = [node["id"] for node in workflow["nodes"]]
    assert len(set(ids)) == len(ids)
    assert max(ids) <= workflow["last_node_id"]
    for node in workflow["nodes"]:
        assert node["mode"] == 0
        assert node["properties"]["Node name for S&R"] == node["type"]
    for node in nodes_as_saved(workflow):
        spec = info[node["type"]]
        assert not spec.get("deprecated")
        assert node["properties"]["cnr_id"] == PACKS.get(node["type"], "comfy-core")
        expected = [
            (item.name, item.type, item.is_widget, 7 if item.optional else None)  # 7: the hollow circle
            for item in node_inputs(spec)
        ]
        slots = [(slot["name"], slot["type"], "widget" in slot, slot.get("shape")) for slot in node["inputs"]]
        assert slots == expected, node["type"]
        assert slots_of(node["outputs"]) == outputs_of(spec), node["type"]


def test_links(workflow, info):
    nodes = {node["id"]: node for node in workflow["nodes"]}
    links = {link[0]: link for link in workflow["links"]}
    assert len(links) == len(workflow["links"])
    assert max(links) <= workflow["last_link_id"]
    for link, origin, origin_slot, target, target_slot, kind in links.values():
        source, sink = nodes[origin]["outputs"][origin_slot], nodes[target]["inputs"][target_slot]
        assert link in source["links"]
        assert link == sink["link"]
        assert source["type"] == sink["type"] == kind
    for node in real_nodes(workflow):
        assert {slot["link"] for slot in node["inputs"]} - {None} <= set(links)
        assert {link for slot in node["outputs"] for link in slot["links"] or []} <= set(links)
        required = {item.name for item in node_inputs(info[node["type"]]) if not item.is_widget and not item.optional}
        assert required <= {slot["name"] for slot in node["inputs"] if slot["link"] is not None}, node["type"]


def test_model_files_are_named(workflow, info):
    """In the note, and in the properties from which the browser offers to download what is missing."""
    note = "".join(node["widgets_values"][0] for node in workflow["nodes"] if node["type"] in NOTES)
    for node in real_nodes(workflow):
        values = [value for item, value in widget_values(node, info[node["type"]]) if item and item.name in FILE_INPUTS]
        models = node["properties"].get("models", [])
        assert [model["name"] for model in models] == values, node["type"]
        for model in models:
            assert f"`{model['name']}`" in note
            assert f"`{model['directory']}`" in note
            assert model["url"].startswith("https://")
            assert model["url"].endswith("/" + model["name"])


def test_twin_is_the_workflow(name, workflow, info):
    twin = load(name, "api")
    assert {node_id: {key: node[key] for key in ("class_type", "inputs")} for node_id, node in twin.items()} == to_prompt(
        workflow, info
    )
    for node in real_nodes(workflow):
        title = node.get("title") or info[node["type"]]["display_name"] or node["type"]
        assert twin[str(node["id"])]["_meta"] == {"title": title}


def test_queue_misses_nothing_but_model_files_and_pictures(name, server, info, comfyui_path):
    """All other values are allowed. Pictures come with ComfyUI; the folder of the server under test is empty."""
    twin = load(name, "api")
    with pytest.raises(PromptRejected) as rejected:
        server.queue(twin)
    errors = {
        (node_id, error["type"], error["extra_info"]["input_name"])
        for node_id, answer in rejected.value.node_errors.items()
        for error in answer["errors"]
    }
    missing = set()
    for node_id, node in twin.items():
        missing |= {(node_id, "value_not_in_list", item) for item in FILE_INPUTS & set(node["inputs"])}
        pictures = [item.name for item in node_inputs(info[node["class_type"]]) if item.is_upload]
        assert all((comfyui_path / "input" / node["inputs"][picture]).is_file() for picture in pictures)
        missing |= {(node_id, "custom_validation_failed", item) for item in pictures}
    assert errors == missing


# --- the same graphs with tiny models ---------------------------------------------------------------------------------

TINY_MODELS = {
    "flux1-dev.safetensors": "flux.safetensors",
    "flux1-dev-Q8_0.gguf": "flux.gguf",
    "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors": "wan_t2v.safetensors",
    "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors": "wan_t2v_low.safetensors",
    "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors": "wan22_i2v.safetensors",
    "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors": "wan22_i2v_low.safetensors",
    "qwen_image_fp8_e4m3fn.safetensors": "family-qwen.safetensors",
    "qwen_image_bf16.safetensors": "family-qwen.safetensors",
    "z_image_turbo_bf16.safetensors": "family-z-image.safetensors",
    "sd_xl_base_1.0.safetensors": "family-sdxl.safetensors",
    "minimax_h3_fl2va_pruned_int8_convrot.safetensors": "family-minimax.safetensors",
}
CONTROLLED = "Flux with ControlNet on all GPUs"
H3 = "MiniMax-H3 image to video on all GPUs"
LARGER = "Model larger than one GPU"
UPSCALING = "Upscaling on all GPUs"
SERVED = {
    H3: "minimax", "Qwen-Image on all GPUs": "qwen", LARGER: "qwen", "SDXL with CFG on all GPUs": "sdxl",
    "Z-Image on all GPUs": "z-image",
}  # fmt: skip
"""Templates whose tiny model is one of `support.families`, and its name there."""

WITH_SOUND = {H3}
"""Whose latent is a video and its sound, and whose node for the size encodes text and pictures, too."""

CONDITIONING = {
    "Flux on all GPUs": {"tokens": 12, "width": 64, "pooled_width": 64},
    CONTROLLED: {"tokens": 12, "width": 64, "pooled_width": 64},
    "Flux with EasyCache on all GPUs": {"tokens": 12, "width": 64, "pooled_width": 64},
    H3: {"tokens": 12, "width": 48},
    "GGUF on all GPUs": {"tokens": 12, "width": 64, "pooled_width": 64},
    "Qwen-Image on all GPUs": {"tokens": 9, "width": 48},
    LARGER: {"tokens": 9, "width": 48},
    "SDXL with CFG on all GPUs": {"tokens": 7, "width": 32, "pooled_width": 16},
    "Wan 2.2 text to video on all GPUs": {"tokens": 16, "width": 64},
    "Wan 2.2 image to video on all GPUs": {"tokens": 16, "width": 64},
    "Z-Image on all GPUs": {"tokens": 7, "width": 48},
}
SMALLER = {"width": 64, "height": 80, "length": 9}
TALLER = {"height": 96}
"""Of models that take multiples of 32."""

FEWER_STEPS = 5
"""What numbers of steps are divided by."""

LEFT_OUT = {"DualCLIPLoader", "CLIPLoader", "CreateVideo", "SaveImage", "SaveVideo"}


@pytest.fixture(scope="module")
def low_noise_model(checkpoints_dir):
    """Image to video has a low-noise model with weights of its own, too."""
    changed = replace(checkpoints.CHECKPOINTS["wan22_i2v"], seed=1)
    checkpoints.write("wan22_i2v", checkpoints_dir, file_stem="wan22_i2v_low", checkpoint=changed)


def tiny(name: str, *, world_size: int | None) -> dict[str, Json]:
    """The API twin from the tiny model to the latent; without the nodes of this pack when `world_size` is None."""
    prompt = load(name, "api")
    seeds = itertools.count(100)
    smaller = SMALLER | (TALLER if name in WITH_SOUND else {})
    for node_id, node in list(prompt.items()):
        inputs = node["inputs"]
        inputs |= {key: smaller[key] for key in smaller if key in inputs}
        for key in {"steps", "start_at_step", "end_at_step"} & set(inputs):
            inputs[key] = -(-inputs[key] // FEWER_STEPS)
        for key in {"ckpt_name", "unet_name"} & set(inputs):
            inputs[key] = TINY_MODELS[inputs[key]]
        match node["class_type"]:
            case "CLIPTextEncode":
                prompt[node_id] = {"class_type": "TestConditioning", "inputs": {"seed": next(seeds), **CONDITIONING[name]}}
            case "LoadImage":
                size = {"width": 96, "height": 64, "frames": 1}
                prompt[node_id] = {"class_type": "TestImage", "inputs": {"seed": next(seeds), **size}}
            case "CLIPLoader" if name in WITH_SOUND:
                prompt[node_id] = {"class_type": "TestEncoder", "inputs": CONDITIONING[name]}
            case "VAELoader" if name in WITH_SOUND:
                codec = {"channels": 24, "space": 16, "time": 4}
                prompt[node_id] = {"class_type": "TestCodec", "inputs": {"seed": next(seeds), **codec}}
            case "VAELoader":
                codec = {"channels": 16, "video": name != CONTROLLED}
                prompt[node_id] = {"class_type": "TestVae", "inputs": {"seed": next(seeds), **codec}}
            case "ControlNetLoader":
                inputs["control_net_name"] = "flux_union.safetensors"
            case "VAEDecode" | "CPVAEDecode" | "VAEDecodeAudio" as decode:
                samples = inputs["samples"]
                if name in WITH_SOUND:
                    part = {"samples": samples, "index": int(decode == "VAEDecodeAudio")}
                    prompt[f"part_{node_id}"] = {"class_type": "TestLatentPart", "inputs": part}
                    samples = [f"part_{node_id}", 0]
                prompt[node_id] = {"class_type": "SaveLatent", "inputs": {"samples": samples, "filename_prefix": name}}
            case "ApplyContextParallel" if world_size is not None:
                prompt["cp_config"] = {"class_type": "CPConfig", "inputs": cp_config(world_size=world_size)}
                inputs["cp_config"] = ["cp_config", 0]
            case class_type if class_type in LEFT_OUT:
                del prompt[node_id]
    return prompt if world_size is not None else without_context_parallel(prompt)


def without_context_parallel(prompt: dict[str, Json]) -> dict[str, Json]:
    models = {node_id: node["inputs"]["model"] for node_id, node in prompt.items() if node["class_type"] == "ApplyContextParallel"}
    assert models
    kept = {node_id: node for node_id, node in prompt.items() if node["class_type"] not in OWN_NODES}
    for node in kept.values():
        model = node["inputs"].get("model")
        if model is not None and model[0] in models:
            node["inputs"]["model"] = models[model[0]]
    return kept


@pytest.fixture(scope="module")
def gguf_file(checkpoints_dir):
    """What the tests' own loader of GGUF files reads."""
    folder = checkpoints_dir / "diffusion_models"
    gguf_files.write(folder / "flux.safetensors", folder / "flux.gguf")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {*SERVED, UPSCALING}])
def test_latent_equals_the_graph_without_context_parallel(name, server, low_noise_model, gguf_file):
    compare(name, server)


@pytest.mark.parametrize(("name", "served"), SERVED.items())
def test_latent_of_a_family_equals_the_graph_without_context_parallel(name, served, server, family_checkpoints, as_checkpoint):
    as_checkpoint(served)
    compare(name, server)


@pytest.mark.bits("the same tiles, blended by the same node")
@pytest.mark.usefixtures("upscalers")
def test_the_upscaled_picture_is_that_of_the_stock_node(server):
    def upscaled(kind):
        prompt = load(UPSCALING, "api")
        (loader,), (picture,), (upscaler,), (saved,) = (
            [node for node in prompt.values() if node["class_type"] == each]
            for each in ("UpscaleModelLoader", "LoadImage", "CPUpscaleImage", "SaveImage")
        )
        loader["inputs"]["model_name"] = "compact.safetensors"
        picture |= {"class_type": "TestImage", "inputs": {"seed": 1, "width": 520, "height": 70}}
        upscaler["class_type"] = kind
        prompt["kept"] = {"class_type": "TestPicture", "inputs": {"image": saved["inputs"]["images"]}}
        saved |= {"class_type": "SaveLatent", "inputs": {"samples": ["kept", 0], "filename_prefix": "upscaled"}}
        return server.sample(prompt, node_id=next(node_id for node_id, node in prompt.items() if node is saved))

    assert (upscaled("CPUpscaleImage") == upscaled("ImageUpscaleWithModel")).all()
    assert server.status()["last_upscale_call"]["degrees"]["tiles"] > 1


def test_the_controlnet_of_the_template_matters(server):
    stock, changed = (tiny(CONTROLLED, world_size=None) for _ in range(2))
    next(node for node in changed.values() if node["class_type"] == "ControlNetApplyAdvanced")["inputs"]["strength"] = 0.0
    (one,), (other,) = (server.latents(server.run(prompt, timeout=120)).values() for prompt in (stock, changed))
    assert differ(one, other)


def compare(name: str, server: ComfyServer) -> None:
    expected = server.latents(server.run(tiny(name, world_size=None), timeout=120))
    found = server.latents(server.run(tiny(name, world_size=2), timeout=120))
    assert len(server.worker_pids()) == 2
    assert found.keys() == expected.keys()
    assert len(found) == (2 if name in WITH_SOUND else 1)
    for node_id, stock in expected.items():
        assert_close(found[node_id], stock)
