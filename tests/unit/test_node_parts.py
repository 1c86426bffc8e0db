"""The part of a prompt that a class of nodes belongs to, by its sockets."""

import pytest

from cp_runtime.comfy.ui.node_parts import part_of
from cp_runtime.controller.prompt_times import DENOISING, LOADING, OTHER, TEXT, UPSCALING, VAE


def node(given, **taken):
    """A class of nodes, as ComfyUI's are made."""
    return type("Node", (), {"RETURN_TYPES": given, "INPUT_TYPES": classmethod(lambda cls: taken)})


def raises(cls):
    raise RuntimeError("no folder")


class Unhashable(type):
    def __eq__(cls, other):
        return False


MODEL, CLIP, FILES, SEED = ("MODEL",), ("CLIP",), (["a.safetensors"],), ("INT", {"default": 0})
CLASSES = {
    "checkpoint": (node(("MODEL", "CLIP", "VAE"), required={"name": FILES}), LOADING),
    "LoRA": (node(("MODEL", "CLIP"), required={"model": MODEL, "clip": CLIP, "name": FILES}), LOADING),
    "text": (node(("CONDITIONING",), required={"text": ("STRING", {}), "clip": CLIP}), TEXT),
    "ControlNet": (node(("CONDITIONING",), required={"positive": ("CONDITIONING",), "control_net": ("CONTROL_NET",)}), OTHER),
    "sampler": (node(("LATENT",), required={"model": MODEL, "seed": SEED}), DENOISING),
    "guided": (node(("LATENT", "LATENT"), required={"guider": ("GUIDER",)}), DENOISING),
    "sampler that passes all on": (node(("MODEL", "LATENT", "VAE", "IMAGE"), optional={"model": MODEL}, required=None), DENOISING),
    "decode": (node(("IMAGE",), required={"samples": ("LATENT",), "vae": ("VAE",)}), VAE),
    "upscale": (node(("IMAGE",), required={"upscale_model": ("UPSCALE_MODEL",), "image": ("IMAGE",)}), UPSCALING),
    "save": (node((), required={"images": ("IMAGE",)}, hidden={"prompt": "PROMPT"}), OTHER),
    "a combo as output": (node((["a", "b"], "LATENT"), required={"model": MODEL}), DENOISING),
    "nothing given": (node(None), OTHER),
    "odd inputs": (node(("LATENT",), required={"model": {}}), OTHER),
    "inputs that fail": (type("Node", (), {"RETURN_TYPES": ("LATENT",), "INPUT_TYPES": classmethod(raises)}), OTHER),
    "a class that is not hashable": (Unhashable("Node", (), {"RETURN_TYPES": ("LATENT",)}), OTHER),
    "no class": (None, OTHER),
}


@pytest.mark.parametrize("name", CLASSES)
def test_part_of_a_class(name):
    cls, part = CLASSES[name]
    assert part_of(cls) == part
