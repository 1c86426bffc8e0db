"""An upscale model that runs on all ranks. The rest is ComfyUI's own: tiles, their blending, smaller tiles where memory is short.

ComfyUI's node calls a descriptor of spandrel, which pads a tile for its network and cuts the result. It gets another one, which has
the ranks call theirs: a copy, by value.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ...controller.calls import ModelCall
from ...errors import ON_ONE_DEVICE, MirrorError, RankOutOfMemory, UnsupportedError, bad_value
from ...pool.config import RuntimeConfig
from ..shared.modules import full_name
from ..shared.objects import Settings, write
from ..shared.pictures import CALLED, TILES, UPSCALE
from .fingerprints import check_code, code_of_patches
from .pictures import ATTRIBUTE, Pictures, is_patched, on_ranks

log = logging.getLogger("context_parallel")

TILE = 512  # of ComfyUI's node, at first
BYTES = 384.0 * 4  # that ComfyUI expects a call to take for each number of its tile, and each time that it is enlarged
_REMEDY = f"Use Upscale Image (using Model), or {ON_ONE_DEVICE}."
Stock = Callable[[Any, Tensor], Tensor]
"""ComfyUI's node: a model, pictures -> larger pictures."""


def run_upscale(model: Any, image: Any, config: RuntimeConfig | None, stock: Stock) -> Tensor:
    """Upscale pictures on the ranks of a config, see `on_ranks`. A single tile is one device's.

    Args:
        image: `[B, H, W, C]`, from 0 to 1.

    Raises:
        ConfigError: an argument is of another type, or the pictures have not the model's channels.
        UnsupportedError: the model cannot run on the ranks and on_unsupported is "error".
        RankOutOfMemory: a rank has no memory even for the smallest tile.
    """
    from spandrel import ImageModelDescriptor  # only ComfyUI's upscaling needs it

    if not isinstance(model, ImageModelDescriptor):  # ComfyUI accepts any JSON in place of a link
        raise bad_value("upscale_model", model, "an upscale model", "Connect Load Upscale Model.")
    if not isinstance(image, Tensor) or image.ndim != 4:
        remedy = "Connect Load Image, VAE Decode or another node that gives IMAGE."
        raise bad_value("image", _shape(image), "pictures, [B, H, W, C]", remedy)
    if image.shape[-1] != model.input_channels:
        allowed = f"pictures, [B, H, W, {model.input_channels}], as the upscale model takes them"
        raise bad_value("image", _shape(image), allowed, "Convert it, or load another upscale model.")

    def ranked(config: RuntimeConfig) -> Tensor:
        if not image.numel() or (image.shape[0] < 2 and max(image.shape[1:3]) <= TILE):
            log.info("the upscale model runs on one device: there are no two tiles")
            return stock(model, image)
        return Upscaler(model, config).upscale(image, stock)

    return on_ranks("the upscale model", config, ranked, partial(stock, model, image))


def _shape(value: Any) -> Any:
    """Return the shapes of tensors, also of those in a list; other values as they are."""
    return list(value.shape) if isinstance(value, Tensor) else list(map(_shape, value)) if isinstance(value, list) else value


class Upscaler(Pictures):
    """An upscale model of ComfyUI and its ranks. Raises UnsupportedError: they cannot have it."""

    def __init__(self, model: Any, config: RuntimeConfig) -> None:
        if is_patched(model.patcher):
            raise UnsupportedError(f"a node patched the upscale model, which the workers do not repeat. {_REMEDY}")
        check_code(model.model)
        super().__init__("upscale", model, config, _REMEDY)
        without = {full_name(type(model)): ("_architecture", "patcher", ATTRIBUTE)}
        settings = Settings(refer=lambda thing: ("network",) if thing is model.model else None, without=without)
        try:
            written = write(model, settings)
        except MirrorError as error:
            raise UnsupportedError(f"{error}. {_REMEDY}") from error
        self._model, self._called, self._code = model, written.leaves, code_of_patches(written.all_code)
        self._failed: list[RankOutOfMemory] = []  # one for each size of tiles that was too large

    def upscale(self, image: Tensor, stock: Stock) -> Tensor:
        while True:
            known = len(self._failed)
            try:
                return self.in_tiles(partial(self._run, image, stock), self._shape_of, self._call)
            except RankOutOfMemory:
                if len(self._failed) == known:  # ComfyUI has no smaller tiles, or it was no tile
                    raise

    def _run(self, image: Tensor, stock: Stock, on_tile: Callable[[Tensor], Tensor], listing: bool) -> Tensor:
        """Run ComfyUI's node; for the parameters see `in_tiles`."""
        too_large = iter([*self._failed])

        def upscale(tile: Tensor) -> Tensor:
            for error in too_large:  # the next one: ComfyUI's node halves its tiles
                raise error
            try:
                out = on_tile(tile)
            except RankOutOfMemory as error:
                self._failed += [] if error in self._failed else [error]
                raise
            return out[..., :0, :0] if listing else out

        # Enlarged by 0, the listed tiles take no time to blend.
        return stock(Descriptor(self._model, self.patcher, 0 if listing else self._model.scale, upscale), image)

    def _shape_of(self, tile: Tensor) -> list[int]:
        channels, scale = self._model.output_channels, self._model.scale
        return [tile.shape[0], channels, *(size * scale for size in tile.shape[2:])]

    def _call(self, tiles: list[Tensor], **arguments: Any) -> ModelCall:
        memory = max(tile.numel() for tile in tiles) * max(self._model.scale, 1) * BYTES
        return self.call(
            UPSCALE, tiles, TILES, memory=memory, dtypes=(torch.float32, torch.float32),
            device=comfy.model_management.intermediate_device(), code=self._code, **{CALLED: self._called}, **arguments,
        )  # fmt: skip


class Descriptor:
    """Replacement for the descriptor of an upscale model: `run` upscales, `stock` does the rest."""

    def __init__(self, stock: Any, patcher: Any, scale: int, run: Callable[[Tensor], Tensor]) -> None:
        self._stock, self.patcher, self.scale, self._run = stock, patcher, scale, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def __call__(self, tile: Tensor) -> Tensor:
        return self._run(tile)
