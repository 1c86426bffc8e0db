"""Every message between the controller and the ranks. `frames` makes bytes of them.

A value with tensors in it is a `Tree` (see `protocol`).

| Sent by | Messages |
|---|---|
| the controller, to rank 0, which broadcasts it | `Request`: `Echo`, `Load`, `Call`, `AttachNetwork`, `Drop`, `Unload`, `MakeRoom`, `Available`, `Shutdown` |
| the controller, out of turn | `GoOn` after a step of the start; `Cancel` |
| every rank, once per command | `Report`: what its request names, or `Cancelled`, or `Failure` |
"""  # noqa: E501  (a table)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from ..engine.config import SequenceSettings
from ..engine.measuring import Measured
from ..engine.policy import CallSplit, CallWork
from .protocol import Tree


@dataclass(frozen=True, kw_only=True)
class Message:
    """What crosses between two processes."""


# --- reports ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Report(Message):
    """How a command ended on a rank."""


R = TypeVar("R", bound=Report)


@dataclass(frozen=True, kw_only=True)
class Done(Report):
    """Well, and there is nothing to say."""


@dataclass(frozen=True, kw_only=True)
class Cancelled(Report):
    """The ranks left the call together."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a rank: resident on the host, peak of its device; after a failure also in use, reserved and free there."""

    host: int
    device: int
    allocated: int | None = None
    reserved: int | None = None
    free: int | None = None


@dataclass(frozen=True, kw_only=True)
class Failure(Report):
    """An exception on a rank.

    Args:
        at: when, on the clock of `time.monotonic`, which all processes of a machine share.
        kind, message, trace: of the exception.
        collectives, pending: collectives that the rank has begun, and of those how many have not ended.
        device_lost: its device does not answer any more, so this process is of no more use.
    """

    at: float
    kind: str
    message: str
    trace: str
    collectives: int = 0
    pending: int = 0
    memory: Memory | None = None
    device_lost: bool = False


@dataclass(frozen=True, kw_only=True)
class Hello(Report):
    """A rank is ready.

    Args:
        name: of its device.
        seconds: of the steps of its start.
        measured, shares: of all ranks, from rank 0.
    """

    device: str
    name: str
    backend: str
    seconds: dict[str, float]
    measured: Measured | None = None
    shares: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Value(Report):
    """A value that rank 0 left in shared memory; on the other ranks, nothing."""

    value: Tree = None
    nbytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Loaded(Report):
    """A model is there.

    Args:
        digest: of the weight patches.
        formats: quantised ones that the device multiplies in.
        samples: of its weights, by name.
        layers: of a model that a loader of a node pack made.
        bytes: of its weights.
    """

    digest: str
    patches_uuid: str
    dtype: str
    cast_dtype: str
    formats: tuple[str, ...]
    samples: dict[str, str]
    layers: str
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Room(Report):
    """Bytes of a rank's device that a model and its calls could take; None for a CPU."""

    available: int | None


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What of a model's blocks is compiled.

    Args:
        kinds: compiled blocks, by class.
        left: classes whose blocks run as they are -> why.
        counts: what this process has compiled since it started.
    """

    kinds: dict[str, int] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Of a call on one rank."""

    seconds: float
    collectives: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """What a call did on one rank.

    Args:
        idle: the rank did not take part.
        degrees: by axis: ring, ulysses, batch; of a VAE rows, batch or tiles.
        at_work: ranks that shared the call: more than the degrees say, where no attention is shared.
        tokens: of this rank, by stream.
        room: bytes that a call can take on the device; None for a CPU.
        predicted_seconds, predicted_bytes: of communication, by the cost model.
        work: as far as the rank knows it; None where nobody chooses ranks for such calls.
        prelude: seconds until the forward began.
    """

    idle: bool = False
    degrees: dict[str, int]
    at_work: int
    tokens: dict[str, int] = field(default_factory=dict)
    room: int | None
    compiled: Compiled = Compiled()
    predicted_seconds: float = 0.0
    predicted_bytes: float = 0.0
    work: CallWork | None = None
    prelude: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CallReport(Value):
    """What a call did and took on one rank.

    Args:
        seconds: from the command to the result.
        modules: planned modules that it came by.
        bytes: sent, by purpose.
    """

    outcome: CallOutcome
    seconds: float
    modules: int
    communication: Communication
    bytes: dict[str, int]
    memory: Memory


# --- requests -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Request(Message, Generic[R]):
    """A command to all ranks. `report` is what each answers if it goes well."""

    report: ClassVar[type[Any]] = Done


@dataclass(frozen=True, kw_only=True)
class Shutdown(Request[Done]):
    """End."""


@dataclass(frozen=True, kw_only=True)
class GoOn(Request[Done]):
    """Take the next step of the start."""


@dataclass(frozen=True, kw_only=True)
class Cancel(Request[Done]):
    """Leave the call."""


@dataclass(frozen=True, kw_only=True)
class Packed(Request[R]):
    """Brings a value of which ranks keep tensors: see `tensor_cache`.

    Args:
        drop: keys of tensors to forget; None = all.
    """

    value: Tree
    drop: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class Echo(Packed[Value]):
    """Return `x` of the value."""

    report: ClassVar[type[Any]] = Value


@dataclass(frozen=True, kw_only=True)
class Load(Request[Loaded]):
    """Hold a model with these weight patches.

    Args:
        key: of its recipe.
        recipe: `comfy.model.wire_recipe.Recipe` as JSON.
        device_bytes: of weights that one rank keeps on its device.
    """

    report: ClassVar[type[Any]] = Loaded
    key: str
    recipe: dict[str, Any]
    patches: Tree
    patches_uuid: str
    placement: str = "whole"
    device_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Call(Packed[CallReport]):
    """Run a method of a model.

    Args:
        sequence: what the user asks for on the sequence axes; with a split its degrees.
        split: ranks and degrees; None = all ranks, and the degrees of `sequence` and `batch_degree`.
        leading: names of the arguments that change with every call.
        memory_scale: times the memory that ComfyUI expects, which the call may need.
        compile: what `torch.compile` is told, see `comfy.compiled.wire`; None = nothing is compiled.
        compile_or_raise: a block that cannot be compiled is an error.
        cancel_every: planned modules between two polls for Cancel; 0 = none.
    """

    report: ClassVar[type[Any]] = CallReport
    key: str
    method: str
    sequence: SequenceSettings
    split: CallSplit | None
    batch_degree: int
    leading: tuple[str, ...]
    memory_scale: float
    compile: dict[str, Any] | None
    compile_or_raise: bool
    cancel_every: int


@dataclass(frozen=True, kw_only=True)
class AttachNetwork(Request[Done]):
    """Hold a network that patches of other nodes refer to by this key."""

    key: str
    network: Tree


@dataclass(frozen=True, kw_only=True)
class Drop(Request[Done]):
    """Forget models and networks."""

    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Unload(Request[Done]):
    """Forget a model, all networks and all tensors of calls."""

    key: str


@dataclass(frozen=True, kw_only=True)
class MakeRoom(Request[Done]):
    """Give freed memory of devices back.

    Args:
        key: of a model that leaves the devices until its next call; None = none does.
        ranks: that do so.
    """

    key: str | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Available(Request[Room]):
    """Say how much memory the devices have."""

    report: ClassVar[type[Any]] = Room


KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        Shutdown, GoOn, Cancel, Echo, Load, Call, AttachNetwork, Drop, Unload, MakeRoom, Available,
        Done, Cancelled, Failure, Hello, Value, Loaded, Room, CallReport,
    )
}  # fmt: skip
