"""A VAE that decodes and encodes on all ranks. The rest is ComfyUI's own: cropping, scaling, batches, tiles.

ComfyUI's `VAE` calls two methods of its network. A shallow copy of it gets a network that sends those calls to the ranks. In mode
*exact* the ranks share the rows of every picture. In mode *tiles* ComfyUI's tiled decode runs twice: once to find out which tiles
there are, which the ranks then decode side by side, and once to blend the results in its own order.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from comfy.cli_args import args
from torch import Tensor

from ...controller.calls import ModelCall
from ...errors import MirrorError, PlanError, RankOutOfMemory, UnsupportedError, bad_value
from ...nested import map_tensors
from ...pool.config import RuntimeConfig
from ...vaes import row_plan_for
from ..forward.ui_obstacles import replaced_code
from ..forward.ui_patcher import executing_node, noted, with_cancel
from ..model.wire_modules import encode_module
from ..ranks.ui import CONTROLLER
from ..ranks.ui_devices import default_config
from .ui_patcher import VAEPatcher
from .wire import EXACT, INPUT, TILES

log = logging.getLogger("context_parallel")

AUTO = "auto"
MODES = (AUTO, EXACT, TILES)
ATTRIBUTE = "context_parallel_patcher"
_REMEDY = "Use VAE Decode or VAE Encode, or set on_unsupported of CP Config to 'single device'."


def run_vae(vae: Any, config: RuntimeConfig | None, mode: str, exact: Callable[[Any], Any], tiles: Callable[[Any], Any]) -> Any:
    """Run a VAE on the ranks of a config.

    Args:
        config: None = the running ranks, or else all devices.
        mode: one of MODES; auto = exact if there is a plan for the VAE, else tiles.
        exact: calls `decode` or `encode` of the given VAE, as ComfyUI's own node does.
        tiles: the same with `decode_tiled` or `encode_tiled`.

    Raises:
        ConfigError: an argument is of another type, or an unknown mode.
        UnsupportedError: the VAE cannot run on the ranks and on_unsupported is "error".
    """
    if not isinstance(vae, comfy.sd.VAE):  # ComfyUI accepts any JSON in place of a link
        raise bad_value("vae", vae, "a VAE", "Connect the output of Load VAE or Load Checkpoint.")
    if config is None:
        workers = CONTROLLER.workers
        config = workers.pool.config if workers is not None else default_config()
    if not isinstance(config, RuntimeConfig):
        raise bad_value("cp_config", config, "the output of a CP Config node", "Connect one, or leave it open.")
    if mode not in MODES:
        raise bad_value("mode", mode, ", ".join(MODES), "Leave it at auto unless you know better.")
    vae.throw_exception_if_invalid()
    on_one_device = tiles if mode == TILES else exact
    if sys.platform != "linux" or config.world_size == 1:
        log.info("the VAE runs on one device: context parallelism needs Linux and more than one rank")
        return on_one_device(vae)
    try:
        mode = mode_for(vae, mode)
        ranked = RankedVAE(vae, config)
        out = exact(ranked.exact()) if mode == EXACT else ranked.tiled(tiles)
        CONTROLLER.journal.did_well()
        return out
    except UnsupportedError as error:
        if config.on_unsupported == "error":
            raise noted(error) from None
        log.warning("the VAE runs on a single device: %s", error)
        return on_one_device(vae)


def mode_for(vae: Any, mode: str) -> str:
    """Return how a VAE runs on the ranks: EXACT or TILES. Raises UnsupportedError if it cannot run as asked."""
    network = vae.first_stage_model
    obstacle = next(_obstacles(vae), None)
    if obstacle is not None:
        raise UnsupportedError(f"{obstacle} {_REMEDY}")
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
    patcher, network = vae.patcher, vae.first_stage_model
    if vae.latent_dim not in (2, 3) or vae.extra_1d_channel is not None:
        yield f"{type(network).__name__} is a VAE of sound or shapes; ranks share pictures and videos."
    if args.cpu_vae and not args.cpu:
        yield "ComfyUI runs with --cpu-vae, and ranks are on other devices."
    if patcher.patches or patcher.object_patches or any(patcher.injections.values()) or patcher.hook_patches:
        yield "a node patched the VAE, which the workers do not repeat."
    yield from replaced_code(network)


class RankedVAE:
    """A VAE and the ranks that run it.

    Args:
        vae: ComfyUI's.
    """

    def __init__(self, vae: Any, config: RuntimeConfig) -> None:
        self.vae = vae
        kept = vars(vae).get(ATTRIBUTE)
        if kept is None or kept.cp_config.devices != config.devices:
            # Lives as long as the VAE: ComfyUI's memory manager keeps nothing alive.
            kept = VAEPatcher.over(vae.patcher, VAEPatcher.config_of(config))
            setattr(vae, ATTRIBUTE, kept)
        self.patcher: VAEPatcher = kept
        self.patcher.cp_config = VAEPatcher.config_of(config)
        self._config = config
        try:
            self._target = self.patcher.target()
        except MirrorError as error:
            raise UnsupportedError(f"{error} {_REMEDY}") from error

    def exact(self) -> Any:
        """Return ComfyUI's VAE with all decodes and encodes on all ranks."""
        return self._with(Network(self.vae.first_stage_model, self._exact))

    def tiled(self, run: Callable[[Any], Any]) -> Any:
        """Run a tiled decode or encode with its tiles on all ranks."""
        found: list[tuple[str, Tensor]] = []
        with _without_bar():
            run(self._with(Network(self.vae.first_stage_model, partial(self._note, found))))
        if not found:
            raise UnsupportedError(f"nothing to decode or encode. {_REMEDY}")
        method = found[0][0]
        tiles = [tile for _, tile in found]
        shapes = [list(self._result_shape(method, tile)) for tile in tiles]
        done = iter(self._send(method, self.vae.vae_output_dtype(), mode=TILES, shapes=shapes, **{INPUT: tiles}))
        with _without_bar():
            return run(self._with(Network(self.vae.first_stage_model, lambda method, tile: next(done))))

    def _with(self, network: Network) -> Any:
        """Copy the VAE with another network, expecting 1/N of the memory."""
        vae, ranks = copy.copy(self.vae), self._config.world_size
        vae.first_stage_model, vae.patcher = network, self.patcher
        vae.device = torch.device("cpu")  # ranks read their inputs from this process's memory
        for name in ("memory_used_decode", "memory_used_encode"):
            setattr(vae, name, _part(getattr(self.vae, name), ranks))
        return vae

    def _note(self, found: list[tuple[str, Tensor]], method: str, tile: Tensor) -> Tensor:
        found.append((method, tile))
        return tile.new_zeros(()).expand(self._result_shape(method, tile))

    def _result_shape(self, method: str, tile: Tensor) -> list[int]:
        """Return the shape that a tile becomes, by the VAE's own figures."""
        vae, dims = self.vae, tile.ndim - 2
        if method == "decode":
            ratios, channels = vae.upscale_ratio, vae.output_channels
        else:
            ratios, channels = vae.downscale_ratio, vae.latent_channels
        each = ratios if isinstance(ratios, (tuple, list)) else [ratios] * dims
        sizes = [
            int(ratio(size)) if callable(ratio) else round(size * ratio) if method == "decode" else size // ratio
            for ratio, size in zip(each[-dims:], tile.shape[2:], strict=True)
        ]
        return [tile.shape[0], channels, *sizes]

    def _exact(self, method: str, whole: Tensor) -> Tensor:
        ratio = 1 if method == "decode" else self.vae.spacial_compression_encode()
        out: Tensor = self._send(method, self.vae.vae_output_dtype(), mode=EXACT, ratio=ratio, **{INPUT: whole})
        return out

    def _send(self, method: str, out_dtype: torch.dtype, *, mode: str, **arguments: Any) -> Any:
        comfy.model_management.throw_exception_if_processing_interrupted()
        first = arguments[INPUT][0] if mode == TILES else arguments[INPUT]
        # In memory order: with channels last, convolutions round differently.
        order = sorted(range(first.ndim), key=lambda dim: -first.stride(dim))
        memory = getattr(self.vae, f"memory_used_{method}")(first.shape, self.vae.vae_dtype)
        items = first.shape[0] if mode == EXACT else self._config.world_size  # every rank has its own tile
        call = ModelCall(
            method=method,
            arguments={
                **arguments,
                INPUT: map_tensors(arguments[INPUT], lambda tensor: tensor.permute(order)),
                "order": order,
                "mode": mode,
                "dtype": self.vae.vae_dtype,
                "out_dtype": out_dtype,
                "memory": float(memory) * items / self._config.world_size,
            },
            leading=(INPUT,),
            device=self.vae.output_device,
            in_place=frozenset({INPUT}),
            encode_network=encode_module,
            sampling=False,
        )
        config, workers = self.patcher.cp_config, CONTROLLER.workers
        # Of the slowest rank: tiles, or convolutions once a call of this kind has counted them.
        steps = 0 if workers is None else workers.pace.modules(call.kind(self._target.key))
        if mode == TILES:
            steps = math.ceil(len(arguments[INPUT]) / self._config.world_size)
        return with_cancel(lambda cancelled: CONTROLLER.call(config, self._target, call, executing_node(), cancelled), steps)


class Network:
    """Replacement for the network of ComfyUI's VAE.

    Args:
        stock: the network that it replaces, and to which everything but `decode` and `encode` is passed on.
        run: (name of the method, input) -> result.
    """

    def __init__(self, stock: Any, run: Callable[[str, Tensor], Tensor]) -> None:
        self._stock, self._run = stock, run
        self._failed: RankOutOfMemory | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def decode(self, samples: Tensor, output_buffer: Tensor | None = None, **options: Any) -> Tensor:
        out = self._result("decode", samples, options)
        return out if output_buffer is None else output_buffer.copy_(out)

    def encode(self, pixels: Tensor, device: Any = None, **options: Any) -> Tensor:
        return self._result("encode", pixels, options)

    def _result(self, method: str, value: Tensor, options: dict[str, Any]) -> Tensor:
        if options:
            raise UnsupportedError(f"the VAE is called with {', '.join(options)}, which is not sent to the workers. {_REMEDY}")
        if self._failed is not None:  # ComfyUI would continue in tiles, with a different picture
            raise self._failed
        try:
            return self._run(method, value)
        except RankOutOfMemory as error:
            self._failed = error
            raise


@contextlib.contextmanager
def _without_bar() -> Iterator[None]:
    """Keep ComfyUI's progress bar from counting steps that are not computed here, while active."""
    hook = comfy.utils.PROGRESS_BAR_HOOK
    comfy.utils.set_progress_bar_global_hook(None)
    try:
        yield
    finally:
        comfy.utils.set_progress_bar_global_hook(hook)


def _part(memory: Callable[..., float], ranks: int) -> Callable[..., float]:
    return lambda *args, **kwargs: memory(*args, **kwargs) / ranks
