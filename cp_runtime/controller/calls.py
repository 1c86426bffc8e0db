"""Calls of a model, from its owner to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ..engine.compiled import CompileSettings
from ..errors import ProtocolError
from ..pool.blocks import SharedBlock
from ..pool.messages import CallOutcome, Copy, Describe, Described, Load, Loaded, Region
from ..pool.protocol import TensorPacker
from ..recent import Recent
from ..timing.times import kind_of
from .placement import Demand


@dataclass(frozen=True, kw_only=True)
class Code:
    """Code that takes part in a call besides the model's.

    Args:
        roots: classes and functions, by name.
        packs: paths of node packs that have some of it.
        digest: of it in this process.
        compare: with that of the ranks; raises UnsupportedError where they differ.
    """

    roots: tuple[str, ...]
    packs: tuple[str, ...]
    digest: str
    compare: Callable[[Sequence[Described]], None]


class ModelState(Protocol):
    """The owner's model, which the ranks' copies must equal."""

    @property
    def key(self) -> str:
        """Names this state of it."""

    @property
    def patches_uuid(self) -> str:
        """Key of its weight patches."""

    @property
    def demand(self) -> Demand:
        """Its memory on the devices."""

    @property
    def name(self) -> str:
        """Its file, as ComfyUI's loaders show it."""

    @property
    def kind(self) -> str:
        """Key that models share if they were loaded alike."""

    @property
    def blocks(self) -> Sequence[SharedBlock]:
        """Memory with its weights."""

    @property
    def regions(self) -> Sequence[Region]:
        """The regions of its weights in these blocks."""

    @property
    def copies(self) -> Callable[[], tuple[Copy, ...]]:
        """Finds the regions that are in model files, too."""

    def request(self, placement: str, device_bytes: int) -> tuple[Load, TensorPacker]:
        """Return the load request and the tensors of its weight patches. `device_bytes`: of weights on each rank's device."""

    def verify(
        self,
        request: Load,
        payload: Tensor,
        loaded: Sequence[Loaded],
        pids: Sequence[int],
        ask: Callable[[Describe], Sequence[Described]],
    ) -> None:
        """Compare it with the ranks' reports and the request's tensors. `ask`: the ranks, for more. Raises MirrorError naming rank
        and both values, UnsupportedError where code in this process has changed it."""


def _no_network(network: nn.Module) -> Sequence[Tensor]:
    raise ProtocolError(f"a call without patches has a network, {type(network).__name__}")


class Keeper(Protocol):
    """Who keeps tensors that patches have noted."""

    @property
    def alive(self) -> bool:
        """Whether they are still there."""

    def fetch(self, number: int, device: torch.device) -> Tensor:
        """Return a tensor by its number. Raises PoolError: it is gone."""

    def drop(self, number: int) -> None:
        """Keep it no longer."""


class Unlisted(Protocol):
    """Patches of other nodes that no table lists."""

    @property
    def on_all_tokens(self) -> tuple[str, ...]:
        """Nodes whose patches every rank runs on all tokens."""

    @property
    def on_whole_batch(self) -> tuple[str, ...]:
        """Nodes because of whose patches every rank runs all items of a batch, of a model that splits no tokens."""

    @property
    def may_need_whole_batch(self) -> bool:
        """Whether the call may be made again with all items on every rank."""

    def check_devices(self, names: Sequence[str]) -> None:
        """Raise UnsupportedError if ranks on these devices may disagree about what the patches make of the same tokens."""

    def check(self, difference: float | None, outcomes: Sequence[CallOutcome], keeper: Keeper) -> None:
        """Note here what they have noted on the ranks. Raise UnsupportedError if a call with them cannot be trusted.

        Args:
            difference: of its result from that on one device, in standard deviations; None = it was not compared.
            outcomes: of the call on each rank.
            keeper: of the tensors among what they have noted.
        """


Purpose = Literal["sampling", "vae", "upscale"]


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """One call of a method of a model: of a transformer's innermost forward, a VAE's decode or encode, or an upscale model."""

    method: str  # its name, one of `pool.messages.Method`
    arguments: dict[str, Any]  # by name; plain data and tensors
    leading: tuple[str, ...]  # names of the first arguments, the latent and the timestep, which change with every call
    device: torch.device  # of the result
    in_place: tuple[str, ...]  # arguments that ranks leave in the memory of the message: each copies only its part
    encode_network: Callable[[nn.Module], Sequence[Tensor]] = _no_network  # writes those of patches
    mixes_batch: bool = False  # another node's patch needs all items of the batch
    by_conditioning: bool = False  # another node's patch needs all items of a conditioning, such as one half of CFG
    unlisted: Unlisted | None = None  # patches that no table lists
    restores: bool = False  # what patches have noted is as it was before the last call, which was given up
    compares: bool = False  # it is to be compared with one device
    all_tokens: bool = False  # its attention needs all tokens of a head at once
    controlnets: tuple[str, ...] = ()  # that the ranks compute: keys of their networks
    controlnets_here: tuple[str, str] | None = None  # why this process did: a key of the report's words, and what they name
    networks: Mapping[str, nn.Module] = field(default_factory=dict)  # networks of patches in the arguments, by key
    code: Code | None = None  # of patches in the arguments
    memory: tuple[float, ...] = ()  # bytes that ComfyUI expects it to take with one item, with two, ...; none of pictures
    memory_scale: float = 1.0  # expected memory of the call / these
    compile: CompileSettings | None = None  # of the model's blocks; None = uncompiled
    purpose: Purpose = "sampling"

    @property
    def sampling(self) -> bool:
        """Whether it is part of a sampling run."""
        return self.purpose == "sampling"

    @property
    def may_be_retried(self) -> bool:
        return self.unlisted is not None and self.unlisted.may_need_whole_batch

    def kind(self, key: str) -> str:
        return kind_of(f"{key} {self.method}", self.arguments)


SLOW_CALL = 0.5  # seconds; a call that may be slower can be cancelled between blocks
# Seconds between two cancel points of a call. Each makes the host wait for its device, which then has nothing queued.
CHECK_INTERVAL = 0.125
MOST_KINDS = 64


class Pace:
    """Speed of the last call of every kind. The oldest of many kinds are forgotten."""

    def __init__(self) -> None:
        self._last: Recent[Hashable, tuple[float, int]] = Recent(MOST_KINDS)

    def note(self, kind: Hashable, ranks: int, seconds: float, modules: int) -> None:
        """Record the end of a call. `ranks`: number of ranks that shared it; `modules`: planned modules that a rank passed."""
        self._last[kind] = seconds * ranks, modules

    def modules(self, kind: Hashable) -> int:
        """Return the number of planned modules that a rank passed; 0 = unknown."""
        return self._last.get(kind, (0.0, 0))[1]

    def modules_per_check(self, kind: Hashable, ranks: int) -> int:
        """Return the number of planned modules that `ranks` ranks may pass between two polls for Cancel; 0 = they need not poll."""
        if kind not in self._last:  # it may be slow: every module is a cancel point
            return 1
        # `work` is seconds on one rank: a call on fewer ranks takes longer, and so do its modules.
        work, modules = self._last[kind]
        return max(1, int(modules * CHECK_INTERVAL * ranks / work)) if work > SLOW_CALL * ranks else 0
