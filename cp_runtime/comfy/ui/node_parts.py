"""What a node does, as far as the types of its slots tell."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ...controller.prompt_times import DENOISING, LOADING, OTHER, TEXT, UPSCALING, VAE

MODELS = {"MODEL", "CLIP", "VAE", "CLIP_VISION", "CONTROL_NET", "STYLE_MODEL", "UPSCALE_MODEL"}
"""Types of slots: a node that has one as an output, and does nothing else, loads."""
PICTURES = {"IMAGE", "LATENT", "AUDIO", "VIDEO"}


def part_of(cls: Any) -> str:
    """Return the part of a prompt that a class of nodes belongs to, by the types of its slots."""
    try:
        return _part_of(cls)
    except Exception:  # noqa: BLE001  (a pack's class may be anything, even unhashable, and its node runs nevertheless)
        return OTHER


@cache
def _part_of(cls: Any) -> str:
    taken, given = input_types(cls), set(map(str, cls.RETURN_TYPES or ()))
    if taken & {"MODEL", "GUIDER"} and given & PICTURES:
        return DENOISING
    if "VAE" in taken and given & PICTURES:
        return VAE
    if "UPSCALE_MODEL" in taken and given & PICTURES:
        return UPSCALING
    if taken & {"CLIP", "CLIP_VISION"} and "CONDITIONING" in given:
        return TEXT
    return LOADING if given & MODELS else OTHER


def input_types(cls: Any) -> set[str]:
    """Return the types of a node's inputs; combos have none."""
    groups: Mapping[str, Any] = cls.INPUT_TYPES()
    inputs = [each for group in ("required", "optional") for each in (groups.get(group) or {}).values()]
    return {each[0] for each in inputs if each and isinstance(each[0], str)}
