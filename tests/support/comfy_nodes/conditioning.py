"""Conditioning nodes: what a text encoder, a CLIP vision model, a VAE or a ControlNet would have given, at random."""

import json
from typing import Any

import comfy.clip_vision
import comfy.controlnet
import torch
from torch import Tensor

from .node import node

PATCH = 2
"""Side of an image patch of Flux, in latent pixels. The attention mask counts in patches."""

CLIP_VISION_TOKENS, CLIP_VISION_WIDTH = 257, 1280


@node("CONDITIONING", attention_mask=["none", "key", "bias", "block"], latent="LATENT")
def TestConditioning(
    seed: int = 0, tokens: int = 12, width: int = 64, pooled_width: int = 0, guidance: float = -1.0, attention_mask: str = "none",
    reference_height: int = 0, reference_width: int = 0, reference_count: int = 1, clip_vision: bool = False,
    concat_latent: bool = False, extra: str = "{}", nonce: int = 0, latent: Any = None,
) -> list[Any]:  # fmt: skip
    """Random conditioning of a chosen shape.

    `nonce` changes nothing but ComfyUI's cache key: a prompt with a
    new nonce samples again, while its loader and model nodes stay cached.

    `attention_mask` (Flux; needs `latent`), over text, image and reference tokens in that order:
    `key` hides the last third of the text from every query; `bias` adds a number of its own to every (query, key) pair;
    `block` hides half of the image from the other half, and each from half of the text.

    `extra` holds more entries as JSON, in which `{"shape": […]}` stands for a tensor at random, `{"tensor": […], "dtype": "int64"}`
    for one as it is, `{"dict": {…}}` for a dict.
    """
    random = Random(seed)
    text = random(1, tokens, width)
    entries: dict[str, Any] = {name: _entry(value, random) for name, value in json.loads(extra).items()}
    if "clip_vision_output" in entries:
        entries["clip_vision_output"] = _vision(entries["clip_vision_output"])
    if pooled_width:
        entries["pooled_output"] = random(1, pooled_width)
    if guidance >= 0:
        entries["guidance"] = guidance
    if clip_vision:
        entries["clip_vision_output"] = _vision(random(1, CLIP_VISION_TOKENS, CLIP_VISION_WIDTH))
    if concat_latent:
        size = _samples(latent, "concat_latent").shape[1:]
        entries["concat_latent_image"] = random(1, *size)
        # As the image-to-video nodes do it: 0 where the first frame is given, 1 where there is nothing yet.
        mask = torch.ones(1, 1, *size[1:])
        mask[:, :, :1] = 0.0
        entries["concat_mask"] = mask
    references = 0
    if reference_height and reference_width:
        draw = Random(0)
        entries["reference_latents"] = [draw(1, 16, reference_height, reference_width) for _ in range(reference_count)]
        references = reference_count * _patches(reference_height) * _patches(reference_width)
    if attention_mask != "none":
        height, width_px = _samples(latent, "attention_mask").shape[-2:]
        grid = (_patches(height), _patches(width_px))
        entries["attention_mask"] = _mask(attention_mask, tokens, grid[0] * grid[1] + references, random)
        entries["attention_mask_img_shape"] = grid
    return [[text, entries]]


@node("CONDITIONING", conditioning="CONDITIONING")
def TestControl(
    conditioning: Any,
    seed: int = 0,
    hidden: int = 256,
    blocks: int = 2,
    strength: float = 0.5,
    reads_weights: bool = False,
    changes_model: bool = False,
) -> list[Any]:
    """Attach a made-up ControlNet for Flux, with one residual for each of the first `blocks` blocks of either kind."""
    kind = _ReadingControl if reads_weights else _ChangingControl if changes_model else _RandomControl
    control = kind(seed, hidden, blocks, strength)
    return [[text, {**extra, "control": control, "control_apply_to_uncond": False}] for text, extra in conditioning]


class _RandomControl(comfy.controlnet.ControlBase):
    def __init__(self, seed: int, hidden: int, blocks: int, strength: float) -> None:
        comfy.controlnet.ControlBase.__init__(self)
        self.seed, self.hidden, self.blocks, self.scale = seed, hidden, blocks, strength

    def get_control(self, x_noisy: Any, t: Any, cond: Any, batched_number: Any, transformer_options: Any) -> Any:
        random = Random(self.seed)
        tokens = _patches(x_noisy.shape[-2]) * _patches(x_noisy.shape[-1])

        def residuals() -> list[Tensor]:
            make = [random(1, tokens, self.hidden) * self.scale for _ in range(self.blocks)]
            return [item.to(x_noisy).expand(x_noisy.shape[0], -1, -1) for item in make]

        return {"input": residuals(), "middle": [], "output": residuals()}

    def copy(self) -> Any:
        clone = type(self)(self.seed, self.hidden, self.blocks, self.scale)
        self.copy_to(clone)
        return clone


class _ChangingControl(_RandomControl):
    """Changes the model for the time of a run, as one of a public pack does: from `pre_run` to `cleanup`."""

    model: Any = None

    def pre_run(self, model: Any, percent_to_timestep_function: Any) -> Any:
        super().pre_run(model, percent_to_timestep_function)
        self.model, model.process_timestep = model, lambda timestep, **_: timestep * 0.5

    def cleanup(self) -> None:
        if self.model is not None:
            del self.model.process_timestep
            self.model = None
        super().cleanup()


class _ReadingControl(_RandomControl, comfy.controlnet.ControlLora):
    """Counts as one that computes with the model's weights."""

    control_weights: dict[str, Tensor] = {}  # noqa: RUF012  (the class wants some)

    def pre_run(self, model: Any, percent_to_timestep_function: Any) -> Any:
        comfy.controlnet.ControlBase.pre_run(self, model, percent_to_timestep_function)

    cleanup = comfy.controlnet.ControlBase.cleanup


class Random:
    """Normal tensors, one after another, from one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)


def _entry(value: object, random: Random) -> object:
    if isinstance(value, list):
        return [_entry(item, random) for item in value]
    if not isinstance(value, dict):
        return value
    if "shape" in value:
        return random(*value["shape"])
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return {name: _entry(item, random) for name, item in value["dict"].items()}


def _vision(hidden_states: Tensor) -> comfy.clip_vision.Output:
    vision = comfy.clip_vision.Output()
    vision.penultimate_hidden_states = vision.last_hidden_state = hidden_states
    return vision


def _samples(latent: dict[str, Any] | None, option: str) -> Tensor:
    if latent is None:
        raise ValueError(f"{option}: needs the input `latent`, whose size it follows")
    return latent["samples"]


def _patches(pixels: int) -> int:
    return -(-pixels // PATCH)


def _mask(kind: str, text: int, image: int, random: Random) -> Tensor:
    """A mask `[1, L, L]` over `text + image` tokens."""
    length = text + image
    if kind == "bias":
        return random(1, length, length)
    visible = torch.ones(1, length, length, dtype=torch.bool)
    if kind == "block":
        middle = text + image // 2
        visible[:, text:middle, middle:] = False
        visible[:, middle:, text:middle] = False
        visible[:, text:middle, : text // 2] = False
        visible[:, middle:, text // 2 : text] = False
    else:
        visible[:, :, text - text // 3 : text] = False
    return torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
