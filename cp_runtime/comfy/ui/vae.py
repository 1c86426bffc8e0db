"""A VAE that decodes and encodes on all ranks. The rest is ComfyUI's own: cropping, scaling, batches, tiles.

ComfyUI's `VAE` calls two methods of its network. A shallow copy of it gets a network that sends those calls to the ranks. In mode
*exact* the ranks share the rows of every picture. In mode *tiles* ComfyUI's tiled decode runs twice: once to list the tiles, which
the ranks then decode side by side, and once to blend the results in its own order.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from comfy.cli_args import args
from torch import Tensor, nn

from ...controller.calls import ModelCall
from ...errors import PlanError, RankOutOfMemory, UnsupportedError, bad_value
from ...nested import map_tensors
from ...pool.config import RuntimeConfig
from ...pool.settings import WHOLE
from ...vaes import draws_noise, row_plan_for
from ..shared.vae import EXACT, INPUT, TILES
from .fingerprints import check_code
from .names import kind_of
from .notes import notes_of
from .patcher import RUNS, ContextParallelPatcher, Run, executing_node, raise_or_warn
from .runtime import CONTROLLER, default_config, nothing_to_share

log = logging.getLogger("context_parallel")

AUTO = "auto"
MODES = (AUTO, EXACT, TILES)
ATTRIBUTE = "context_parallel_patcher"
MANY = 1 << 62
_REMEDY = "Use VAE Decode or VAE Encode, or set on_unsupported of CP Config to 'single device'."


def run_vae(
    vae: Any,
    config: RuntimeConfig | None,
    mode: str,
    exact: Callable[[Any], Any],
    tiles: Callable[[Any], Any],
    decodes: bool = True,
) -> Any:
    """Run a VAE on the ranks of a config.

    Args:
        config: None = the running ranks, or else all devices.
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
    if config is None:
        workers = CONTROLLER.workers
        config = workers.pool.config if workers is not None else default_config()
    if not isinstance(config, RuntimeConfig):
        raise bad_value("cp_config", config, "the output of a CP Config node", "Connect one, or leave it open.")
    if mode not in MODES:
        raise bad_value("mode", mode, ", ".join(MODES), "Leave it at auto unless you know better.")
    vae.throw_exception_if_invalid()
    on_one_device = tiles if mode == TILES else exact
    alone = nothing_to_share()
    if config.world_size == 1 or (alone is not None and alone.is_final):
        log.info("the VAE runs on one device: %s", "there is one rank" if alone is None else alone.words)
        return on_one_device(vae)
    noise = draws_noise(vae.first_stage_model) if decodes else None
    if noise is not None and mode == AUTO:
        log.info("the VAE runs on one device: %s", noise)
        return exact(vae)
    try:
        if noise is not None:
            raise UnsupportedError(f"{noise} Set mode to auto, which runs it on one device, or use VAE Decode.")
        mode = mode_for(vae, mode)
        ranked = RankedVAE(vae, config)
        out = exact(ranked.exact()) if mode == EXACT else ranked.tiled(tiles)
        CONTROLLER.journal.run_succeeded()
        return out
    except UnsupportedError as error:
        raise_or_warn(error, config, "the VAE runs on a single device")
        return on_one_device(vae)


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
    patcher, network = vae.patcher, vae.first_stage_model
    if vae.latent_dim not in (2, 3) or vae.extra_1d_channel is not None:
        yield f"{type(network).__name__} is a VAE of sound or shapes; ranks share pictures and videos."
    if args.cpu_vae and not args.cpu:
        yield "ComfyUI runs with --cpu-vae, and ranks are on other devices."
    if patcher.patches or patcher.object_patches or any(patcher.injections.values()) or patcher.hook_patches:
        yield "a node patched the VAE, which the workers do not repeat."


@contextmanager
def _without_bar() -> Iterator[None]:
    """Show no progress: it would count steps that are not computed here."""
    hook, comfy.utils.PROGRESS_BAR_HOOK = comfy.utils.PROGRESS_BAR_HOOK, None
    try:
        yield
    finally:
        comfy.utils.PROGRESS_BAR_HOOK = hook


class RankedVAE:
    """A VAE of ComfyUI and its ranks."""

    def __init__(self, vae: Any, config: RuntimeConfig) -> None:
        # Whole, as it is small compared with its activations.
        self.vae, config = vae, replace(config, weights=WHOLE, memory_per_rank=0.0, pipeline=None)
        kept = vars(vae).get(ATTRIBUTE)
        if kept is None or kept.cp_config.devices != config.devices:
            # Lives as long as the VAE: ComfyUI's memory manager keeps nothing alive.
            kept = VAEPatcher.over(vae.patcher, config)
            setattr(vae, ATTRIBUTE, kept)
        self.patcher: VAEPatcher = kept
        self.patcher.cp_config = self._config = config
        self.patcher.cp_run = Run(next(RUNS))

    def exact(self) -> Any:
        """Return ComfyUI's VAE with all decodes and encodes on all ranks."""

        def run(method: str, whole: Tensor) -> Any:
            return self._send(method, whole, mode=EXACT, ratio=1 if method == "decode" else self.vae.spacial_compression_encode())

        return self._with(run)

    def tiled(self, run: Callable[[Any], Any]) -> Any:
        tiles: list[Tensor] = []
        methods: set[str] = set()

        def note(method: str, tile: Tensor) -> Tensor:
            methods.add(method)
            tiles.append(tile)
            return tile.new_zeros(()).expand(self._result_shape(method, tile))

        with _without_bar():
            run(self._with(note))
        if not tiles:
            raise UnsupportedError(f"nothing to decode or encode. {_REMEDY}")
        (method,) = methods
        done = iter(self._send(method, tiles, mode=TILES, shapes=[self._result_shape(method, tile) for tile in tiles]))
        with _without_bar():
            return run(self._with(lambda method, tile: next(done)))

    def _with(self, run: Callable[[str, Tensor], Tensor]) -> Any:
        """Copy the VAE with a network that calls `run`, expecting 1/N of the memory."""
        vae, ranks = copy.copy(self.vae), self._config.world_size
        vae.first_stage_model, vae.patcher = Network(self.vae.first_stage_model, run), self.patcher
        vae.device = torch.device("cpu")  # ranks read their inputs from this process's memory
        vae.memory_used_decode = lambda *args, **kwargs: self.vae.memory_used_decode(*args, **kwargs) / ranks
        vae.memory_used_encode = lambda *args, **kwargs: self.vae.memory_used_encode(*args, **kwargs) / ranks
        return vae

    def _result_shape(self, method: str, tile: Tensor) -> list[int]:
        """Return the shape of a tile's result, by the VAE's own figures."""
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

    def _send(self, method: str, given: Any, *, mode: str, **arguments: Any) -> Any:
        """Run the VAE's method on the ranks. `given`: a picture or video, or tiles."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        vae, config, workers = self.vae, self._config, CONTROLLER.workers
        first = given[0] if mode == TILES else given
        # In memory order: with channels last, convolutions round differently.
        order = sorted(range(first.ndim), key=lambda dim: -first.stride(dim))
        memory = getattr(vae, f"memory_used_{method}")(first.shape, vae.vae_dtype)
        items = first.shape[0] if mode == EXACT else config.world_size  # each rank has a tile
        call = ModelCall(
            method=method,
            arguments={
                **arguments,
                INPUT: map_tensors(given, lambda tensor: tensor.permute(order)),
                "order": order,
                "mode": mode,
                "dtype": vae.vae_dtype,
                "out_dtype": vae.vae_output_dtype(),
                "memory": float(memory) * items / config.world_size,
            },
            leading=(INPUT,),
            device=vae.output_device,
            in_place=(INPUT,),
            sampling=False,
        )
        # Of the slowest rank: tiles, or convolutions once a call of this kind has counted them.
        if mode == TILES:
            steps = math.ceil(len(given) / config.world_size)
        else:
            steps = 0 if workers is None else workers.pace.modules(call.kind(kind_of(self.patcher)))
        return self.patcher.on_ranks(
            lambda target, cancelled: CONTROLLER.call(config, target, call, executing_node(), cancelled), steps
        )


class VAEPatcher(ContextParallelPatcher):
    """The ModelPatcher of a VAE whose weights are on the ranks, for ComfyUI's memory manager. It intercepts nothing."""

    def get_free_memory(self, device: torch.device) -> int:
        """Return the bytes that a call may take: from this ComfyUI decides how many items the VAE gets at once."""
        workers = CONTROLLER.workers
        room = workers.room if workers is not None and workers.serves(self.cp_config) else None
        return MANY if room is None else room

    def partially_load(self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        if self.model.current_weight_patches_uuid is not None:  # left on a device by a node without context parallelism
            self.unpatch_model(self.offload_device)
        return self.load_on_ranks()

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        if unpatch_all:
            CONTROLLER.make_room(self.load_device, notes_of(self.model).key)
        return self.model


class Network:
    """Replacement for the network of ComfyUI's VAE: `run` (method name, input) decodes and encodes, `stock` does the rest."""

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
