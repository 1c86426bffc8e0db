"""VAEs and upscale models on the ranks: their patcher, their calls, and tiles.

ComfyUI's tiled functions run twice: once to list the tiles, which the ranks then compute side by side, and once to blend the
results in their own order. The second run gets them group by group: the ranks compute a group while ComfyUI blends the one before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from contextvars import copy_context
from dataclasses import replace
from typing import Any, TypeVar

import comfy.model_management
import comfy.utils
import torch
from torch import Tensor, nn

from ...controller.calls import Code, ModelCall, Purpose
from ...engine.ranks.sharding import in_rounds
from ...errors import UnsupportedError, bad_value
from ...nested import map_tensors
from ...pool.config import RuntimeConfig
from ...pool.settings import WHOLE
from ..shared.pictures import INPUT, TILES, memory_order
from .names import kind_of
from .notes import notes_of
from .patcher import RUNS, ContextParallelPatcher, Run, executing_node, raise_or_warn
from .progress import WorkBar
from .runtime import CONTROLLER, default_config, nothing_to_share

log = logging.getLogger("context_parallel")

T = TypeVar("T")
ATTRIBUTE = "context_parallel_patcher"
MANY = 1 << 62
GROUP_BYTES = 64 << 20
"""Results of a group of tiles, which is at least a round."""


def on_ranks(what: str, config: Any, ranked: Callable[[RuntimeConfig], T], alone: Callable[[], T]) -> T:
    """Run something on ranks, or on one device where there is one only, or `ranked` is refused.

    Args:
        what: "the VAE".
        config: of a node; None = the running ranks, or else all devices.

    Raises:
        ConfigError: it is something else.
        UnsupportedError: the ranks cannot run it, and on_unsupported is "error".
    """
    if config is None:
        workers = CONTROLLER.workers
        config = workers.pool.config if workers is not None else default_config()
    if not isinstance(config, RuntimeConfig):
        raise bad_value("cp_config", config, "the output of a CP Config node", "Connect one, or leave it open.")
    reason = nothing_to_share()
    if config.world_size == 1 or (reason is not None and reason.is_final):
        log.info("%s runs on one device: %s", what, "there is one rank" if reason is None else reason.words)
        return alone()
    try:
        out = ranked(config)
        CONTROLLER.journal.run_succeeded()
        return out
    except UnsupportedError as error:
        raise_or_warn(error, config, f"{what} runs on a single device")
        return alone()


def is_patched(patcher: Any) -> bool:
    """Return whether a node has put something into the network, which the workers do not repeat."""
    return bool(patcher.patches or patcher.object_patches or any(patcher.injections.values()) or patcher.hook_patches)


def final(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function whose first lack of memory is an error of every later call: ComfyUI would go on with smaller tiles."""
    failed: list[torch.OutOfMemoryError] = []

    def call(*given: Any) -> Tensor:
        if failed:
            raise failed[0]
        try:
            return run(*given)
        except torch.OutOfMemoryError as error:
            failed.append(error)
            raise

    return call


@contextmanager
def _without_bar() -> Iterator[None]:
    """Show no progress: it would count steps that are not computed here."""
    hook, comfy.utils.PROGRESS_BAR_HOOK = comfy.utils.PROGRESS_BAR_HOOK, None
    try:
        yield
    finally:
        comfy.utils.PROGRESS_BAR_HOOK = hook


class Pictures:
    """A VAE or an upscale model of ComfyUI, and its ranks.

    Args:
        purpose: of its calls.
        model: it; an object with a `patcher`.
        remedy: for the user, where its results have other shapes than they should.
    """

    def __init__(self, purpose: Purpose, model: Any, config: RuntimeConfig, remedy: str) -> None:
        # Whole, as it is small compared with its activations.
        self.config = replace(config, weights=WHOLE, memory_per_rank=0.0, pipeline=None)
        self._purpose, self._remedy = purpose, remedy
        kept = vars(model).get(ATTRIBUTE)
        if kept is None or kept.cp_config.devices != config.devices or kept.model is not model.patcher.model:
            # Lives as long as the model: ComfyUI's memory manager keeps nothing alive.
            kept = PicturesPatcher.over(model.patcher, config)
            setattr(model, ATTRIBUTE, kept)
        self.patcher: PicturesPatcher = kept
        self.patcher.cp_config = self.config
        self.patcher.cp_run = Run(next(RUNS))

    def call(
        self,
        method: str,
        given: Any,
        mode: str,
        *,
        memory: float,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        code: Code | None = None,
        **arguments: Any,
    ) -> ModelCall:
        """Return a call of the network.

        Args:
            given: a picture or video, or tiles.
            memory: bytes that ComfyUI expects one rank to take.
            dtypes: that it computes in, and of the result.
            device: of the result.
        """
        first = given[0] if mode == TILES else given
        order = memory_order(first)  # with channels last, convolutions round differently
        dtype, out_dtype = dtypes
        return ModelCall(
            method=method,
            arguments={
                **arguments,
                INPUT: map_tensors(given, lambda tensor: tensor.permute(order)),
                "order": order,
                "mode": mode,
                "dtype": dtype,
                "out_dtype": out_dtype,
                "memory": memory,
            },
            leading=(INPUT,),
            device=device,
            in_place=(INPUT,),
            code=code,
            purpose=self._purpose,
        )

    def convolutions(self, call: ModelCall) -> int:
        """Return the convolutions of a call, once one of its kind has counted them; 0 before."""
        workers = CONTROLLER.workers
        return 0 if workers is None else workers.pace.modules(call.kind(kind_of(self.patcher)))

    def send(self, call: ModelCall, bar: WorkBar) -> Any:
        """Run a call on the ranks."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        return self.patcher.on_ranks(
            lambda target, cancelled: CONTROLLER.call(self.config, target, call, executing_node(), cancelled), bar
        )

    def in_tiles(
        self,
        run: Callable[[Callable[[Tensor], Tensor], bool], Any],
        shape_of: Callable[[Tensor], list[int]],
        call: Callable[..., ModelCall],
    ) -> Any:
        """Run ComfyUI's tiled function on the ranks, and return its result.

        Args:
            run: calls it, with a function to compute a tile by. Its second argument says that tiles are only listed.
            shape_of: returns the shape of a tile's result.
            call: returns the call of some tiles, given further arguments of it.

        Raises:
            UnsupportedError: there are no tiles.
        """
        tiles: list[Tensor] = []

        def note(tile: Tensor) -> Tensor:
            tiles.append(tile)
            return tile.new_zeros(()).expand(shape_of(tile))

        with _without_bar():
            run(note, True)
        if not tiles:
            raise UnsupportedError(f"there is nothing to compute. {self._remedy}")
        shapes = [shape_of(tile) for tile in tiles]
        groups = self._groups(tiles, shapes)
        bar = WorkBar(sum(steps for _, steps in groups))

        def send(group: slice) -> list[Tensor]:
            return self.send(call(tiles[group], shapes=shapes[group], remedy=self._remedy), bar)

        with _without_bar(), closing(_done(groups, send, bar)) as done:
            listed = iter(tiles)

            def take(tile: Tensor) -> Tensor:
                expected = next(listed, None)
                # ComfyUI may have begun anew, with smaller ones.
                if expected is None or not torch.equal(tile.nan_to_num(), expected.nan_to_num()):
                    raise torch.OutOfMemoryError("ComfyUI's process ran out of memory while it blended tiles")
                return next(done)

            return run(final(take), False)

    def _groups(self, tiles: list[Tensor], shapes: list[list[int]]) -> list[tuple[slice, int]]:
        """Return the places of groups of tiles, and the steps of each."""
        shares = workers.pool.shares if (workers := CONTROLLER.workers) is not None else ()

        def rounds(some: slice) -> list[list[list[int]]]:
            return in_rounds([tile.numel() for tile in tiles[some]], self.config.world_size, shares)

        each = sum(map(len, rounds(slice(None))[0]))
        count = each * max(1, GROUP_BYTES // (each * 4 * max(map(math.prod, shapes))))
        groups = (slice(first, first + count) for first in range(0, len(tiles), count))
        return [(group, sum(max(map(len, now)) for now in rounds(group))) for group in groups]


def _done(groups: list[tuple[slice, int]], send: Callable[[slice], list[Tensor]], bar: WorkBar) -> Generator[Tensor, None, None]:
    """Yield the results of groups of tiles, one by one. A thread gets those of the next group meanwhile."""
    context, inference = copy_context(), torch.is_inference_mode_enabled()

    def get(number: int) -> list[Tensor]:
        bar.before = sum(steps for _, steps in groups[:number])
        with torch.inference_mode(inference):
            return send(groups[number][0])

    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(context.run, get, 0)
        for number in range(1, len(groups) + 1):
            results = coming.result()
            if number < len(groups):
                coming = thread.submit(context.run, get, number)
            yield from results


class PicturesPatcher(ContextParallelPatcher):
    """The ModelPatcher of a network whose weights are on the ranks, for ComfyUI's memory manager. It intercepts nothing."""

    def get_free_memory(self, device: torch.device) -> int:
        """Return the bytes that a call may take: from this ComfyUI decides how many items a VAE gets at once."""
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
