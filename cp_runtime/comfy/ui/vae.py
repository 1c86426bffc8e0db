"""A VAE that decodes and encodes on all ranks. The rest is ComfyUI's own: cropping, scaling, batches, tiles.

ComfyUI's `VAE` calls two methods of its network. A shallow copy of it gets a network that sends those calls to the ranks. In mode
*exact* the ranks share the rows of every picture, in mode *tiles* tiles.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import comfy.sd
import torch
from comfy.cli_args import args
from torch import Tensor

from ...controller.calls import ModelCall
from ...errors import ON_ONE_DEVICE, PlanError, UnsupportedError, bad_value
from ...pool.config import RuntimeConfig
from ...vaes import draws_noise, row_plan_for
from ..shared.pictures import EXACT, TILES
from .fingerprints import check_code
from .pictures import Pictures, final, is_patched, on_ranks
from .progress import WorkBar

log = logging.getLogger("context_parallel")

AUTO = "auto"
MODES = (AUTO, EXACT, TILES)
_REMEDY = f"Use VAE Decode or VAE Encode, or {ON_ONE_DEVICE}."


def run_vae(
    vae: Any,
    config: RuntimeConfig | None,
    mode: str,
    exact: Callable[[Any], Any],
    tiles: Callable[[Any], Any],
    decodes: bool = True,
) -> Any:
    """Run a VAE on the ranks of a config, see `on_ranks`.

    Args:
        mode: one of MODES; auto = exact if there is a plan for the VAE, else tiles.
        exact: calls `decode` or `encode` of the given VAE, as ComfyUI's own node does.
        tiles: the same with `decode_tiled` or `encode_tiled`.
        decodes: whether they decode.

    Raises:
        ConfigError: an argument is of another type, or an unknown mode.
        UnsupportedError: the VAE cannot run on the ranks and on_unsupported is "error".
    """
    if not isinstance(vae, comfy.sd.VAE):  # ComfyUI accepts any JSON in place of a link
        raise bad_value("vae", vae, "a VAE", "Connect Load VAE or Load Checkpoint.")
    if mode not in MODES:
        raise bad_value("mode", mode, ", ".join(MODES), "Leave it at auto unless you know better.")
    vae.throw_exception_if_invalid()

    def ranked(config: RuntimeConfig) -> Any:
        noise = draws_noise(vae.first_stage_model) if decodes else None
        if noise is not None and mode == AUTO:
            log.info("the VAE runs on one device: %s", noise)
            return exact(vae)
        if noise is not None:
            raise UnsupportedError(f"{noise} Set mode to auto, which runs it on one device, or use VAE Decode.")
        ours, method = mode_for(vae, mode), "decode" if decodes else "encode"
        on_all = RankedVAE(vae, config, method)
        return exact(on_all.exact()) if ours == EXACT else on_all.tiled(tiles)

    return on_ranks("the VAE", config, ranked, partial(tiles if mode == TILES else exact, vae))


def mode_for(vae: Any, mode: str) -> str:
    """Return how a VAE runs on the ranks: EXACT or TILES. Raises UnsupportedError if it cannot run as asked."""
    network = vae.first_stage_model
    obstacle = next(_obstacles(vae), None)
    if obstacle is not None:
        raise UnsupportedError(f"{obstacle} {_REMEDY}")
    check_code(network)
    if mode != TILES:
        try:
            row_plan_for(network)
            return EXACT
        except (UnsupportedError, PlanError) as error:
            if mode == EXACT:
                raise UnsupportedError(str(error)) from error
            log.info("VAE in tiles: %s", error)
    if vae.handles_tiling:
        raise UnsupportedError(f"{type(network).__name__} cuts tiles by itself, which the ranks cannot share. {_REMEDY}")
    return TILES


def _obstacles(vae: Any) -> Iterator[str]:
    network = vae.first_stage_model
    if vae.latent_dim not in (2, 3) or vae.extra_1d_channel is not None:
        yield f"{type(network).__name__} is a VAE of sound or shapes; ranks share pictures and videos."
    if args.cpu_vae and not args.cpu:
        yield "ComfyUI runs with --cpu-vae, and ranks are on other devices."
    if is_patched(vae.patcher):
        yield "a node patched the VAE, which the workers do not repeat."


class RankedVAE(Pictures):
    """A VAE of ComfyUI and its ranks. `method`: "decode" or "encode"."""

    def __init__(self, vae: Any, config: RuntimeConfig, method: str) -> None:
        super().__init__("vae", vae, config, "Set tile_size and overlap to multiples of 64, or mode to exact.")
        self.vae, self._method = vae, method

    def exact(self) -> Any:
        """Return ComfyUI's VAE with all decodes and encodes on all ranks."""
        ratio = 1 if self._method == "decode" else self.vae.spacial_compression_encode()

        def run(whole: Tensor) -> Any:
            # Of the slowest rank.
            call = self._call(whole, whole, EXACT, whole.shape[0] / self.config.world_size, ratio=ratio)
            return self.send(call, WorkBar(self.convolutions(call)))

        return self._with(final(run))

    def tiled(self, run: Callable[[Any], Any]) -> Any:
        def call(tiles: list[Tensor], **arguments: Any) -> ModelCall:
            return self._call(tiles, tiles[0], TILES, 1.0, **arguments)

        return self.in_tiles(lambda on_tile, _: run(self._with(on_tile)), self._result_shape, call)

    def _with(self, run: Callable[[Tensor], Tensor]) -> Any:
        """Copy the VAE with a network that calls `run`, expecting 1/N of the memory."""
        vae, ranks = copy.copy(self.vae), self.config.world_size
        vae.first_stage_model, vae.patcher = Network(self.vae.first_stage_model, run), self.patcher
        vae.device = torch.device("cpu")  # ranks read their inputs from this process's memory
        vae.memory_used_decode = lambda *args, **kwargs: self.vae.memory_used_decode(*args, **kwargs) / ranks
        vae.memory_used_encode = lambda *args, **kwargs: self.vae.memory_used_encode(*args, **kwargs) / ranks
        return vae

    def _result_shape(self, tile: Tensor) -> list[int]:
        """Return the shape of a tile's result, by the VAE's own figures."""
        vae, dims = self.vae, tile.ndim - 2
        decodes = self._method == "decode"
        if decodes:
            ratios, channels = vae.upscale_ratio, vae.output_channels
        else:
            ratios, channels = vae.downscale_ratio, vae.latent_channels
        each = ratios if isinstance(ratios, (tuple, list)) else [ratios] * dims
        sizes = [
            int(ratio(size)) if callable(ratio) else round(size * ratio) if decodes else size // ratio
            for ratio, size in zip(each[-dims:], tile.shape[2:], strict=True)
        ]
        return [tile.shape[0], channels, *sizes]

    def _call(self, given: Any, first: Tensor, mode: str, items: float, **arguments: Any) -> ModelCall:
        """Return a call of the method. `first`: of the tensors given. `items`: of these on one rank."""
        vae = self.vae
        memory = items * getattr(vae, f"memory_used_{self._method}")(first.shape, vae.vae_dtype)
        dtypes = vae.vae_dtype, vae.vae_output_dtype()
        return self.call(self._method, given, mode, memory=memory, dtypes=dtypes, device=vae.output_device, **arguments)


class Network:
    """Replacement for the network of ComfyUI's VAE: `run` decodes or encodes, `stock` does the rest."""

    def __init__(self, stock: Any, run: Callable[[Tensor], Tensor]) -> None:
        self._stock, self._run = stock, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def decode(self, samples: Tensor, output_buffer: Tensor | None = None, **options: Any) -> Tensor:
        out = self._result(samples, options)
        return out if output_buffer is None else output_buffer.copy_(out)

    def encode(self, pixels: Tensor, device: Any = None, **options: Any) -> Tensor:
        return self._result(pixels, options)

    def _result(self, value: Tensor, options: dict[str, Any]) -> Tensor:
        if options:
            raise UnsupportedError(f"the VAE is called with {', '.join(options)}, which is not sent to the workers. {_REMEDY}")
        return self._run(value)
