"""Every message between the controller and the ranks, as bytes and back.

The header of a frame is a JSON object: the name of the message, the number of the command that it belongs to, the bytes of its
tensors, which lie in shared memory or behind the header, the seconds that the command may take, and the fields of its dataclass,
which are checked one by one. A value with tensors in it is a `Tree` (see `protocol`). Reading it runs no code.

| Sent by | Messages |
|---|---|
| the controller, to every rank | `Request`: `Import`, `Connect`, `Probe`, `Compare`, `Measure`; `Echo`, `Locate`, `Load`, `Call`, `Fetch`, `AttachNetwork`, `Describe`, `Drop`, `MakeRoom`, `Available`; `Shutdown` |
| the controller, out of turn, to every rank | `Cancel`, and when all have answered `Leave` |
| every rank, once per command | `Report`: what its request names, or `Cancelled`, or `Failure` |
| every rank, out of turn | `Beat`; `Arrived`, the answer to `Cancel` |
"""  # noqa: E501  (a table)

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

from ..engine.compiled import CompileSettings
from ..engine.ranks.config import PipelineSettings, SequenceSettings
from ..errors import ProtocolError
from .frames import MAX_HEADER
from .protocol import LARGEST, Tree, decode, encode, is_number

Method = Literal["forward", "_forward", "decode", "encode", "upscale"]
"""Of a transformer, of a VAE, or of an upscale model."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message between two processes."""


# --- reports ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Report(Message):
    """How a command ended on a rank."""


R = TypeVar("R", bound=Report)


@dataclass(frozen=True, kw_only=True)
class Done(Report):
    """The command went well, and there is nothing else to report."""


@dataclass(frozen=True, kw_only=True)
class Cancelled(Report):
    """The ranks left the call together."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes: resident on the host, peak of the device; after a failure also in use, reserved and free there."""

    host: int
    device: int
    allocated: int | None = None
    reserved: int | None = None
    free: int | None = None


@dataclass(frozen=True, kw_only=True)
class Failure(Report):
    """An exception on a rank."""

    at: float  # on the clock of `time.monotonic`, which all processes of a machine share
    kind: str
    message: str
    trace: str
    collectives: int = 0  # that the rank has begun
    pending: int = 0  # of those, that have not ended
    memory: Memory | None = None
    device_lost: bool = False  # its device no longer responds, so this process cannot be used again


@dataclass(frozen=True, kw_only=True)
class Compared(Report):
    """How fast an exchange through shared memory is, the same on every rank."""

    speed: float  # times the speed over the devices' own library; 0 = ranks cannot exchange so


@dataclass(frozen=True, kw_only=True)
class Imported(Report):
    """The rank is ready to connect."""

    shares: bool  # it maps memory of the controller; else bytes come and go in frames


@dataclass(frozen=True, kw_only=True)
class Connected(Report):
    """The rank has joined the process groups."""

    relayed: bool  # it gets the bytes of messages from another rank of its computer


@dataclass(frozen=True, kw_only=True)
class Ready(Report):
    """A rank has started."""

    name: str  # of its device
    shares: tuple[int, ...]  # of all ranks, the same on each


@dataclass(frozen=True, kw_only=True)
class Value(Report):
    """A value that rank 0 left in shared memory; on the other ranks, nothing."""

    value: Tree = None
    nbytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Located(Report):
    """The parts of `Locate` that this computer has."""

    found: tuple[int, ...]  # numbers of copies


@dataclass(frozen=True, kw_only=True)
class Loaded(Report):
    """A model is there."""

    digest: str  # of the weight patches
    formats: tuple[str, ...]  # quantised ones that the device multiplies in
    casts: bool  # it could multiply in others, too, and casts as other ranks do
    code: str  # hash of what it computes with: `comfy.shared.fingerprint`
    bytes: int  # of its weights
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Described(Report):
    """What a rank computes with."""

    code: dict[str, str]  # hashes by name
    failed: dict[str, str]  # node packs whose import has ended with an error


@dataclass(frozen=True, kw_only=True)
class Room(Report):
    """A rank's device: bytes that a model and its calls could take, None for a CPU, and quantised formats that it multiplies in."""

    available: int | None
    formats: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The parts of a model's blocks that are compiled."""

    kinds: dict[str, int] = field(default_factory=dict)  # compiled blocks, by class
    left: dict[str, str] = field(default_factory=dict)  # classes whose blocks run as they are -> why
    counts: dict[str, int] = field(default_factory=dict)  # what this process has compiled since it started


@dataclass(frozen=True, kw_only=True)
class Communication:
    seconds: float
    collectives: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A rank's part of a call in stages."""

    stage: int  # of this rank, from 0
    stages: int
    patches: int  # 1 = the call was exact
    runs: int  # of the forward: items of the batch times patches
    kept: int  # bytes of keys and values that the rank keeps

    @property
    def degrees(self) -> dict[str, int]:
        return {"stages": self.stages, "patches": self.patches}


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """The outcome of a call on one rank."""

    idle: bool = False  # the rank did not take part
    degrees: dict[str, int]  # by axis: ring, ulysses, batch, stages and patches; of pictures rows, batch or tiles
    at_work: int  # ranks that shared the call: more than the degrees say, where no attention is shared
    tokens: dict[str, int] = field(default_factory=dict)  # of this rank, by stream
    room: int | None  # bytes that a call can take on the device; None for a CPU
    compiled: Compiled = Compiled()
    predicted_seconds: float = 0.0  # of communication, by the cost model
    predicted_bytes: float = 0.0
    prelude: float = 0.0  # seconds until the forward began
    staged: Staged | None = None  # None where every rank computes all blocks
    noted: str = ""  # what patches of other nodes that no table lists have noted: `comfy.shared.noted`
    unsaid: str = ""  # why that cannot be said
    wrote: tuple[str, ...] = ()  # entries of transformer_options that they have written


@dataclass(frozen=True, kw_only=True)
class CallReport(Value):
    """The outcome and the figures of a call on one rank."""

    outcome: CallOutcome
    seconds: float  # from the command to the result
    modules: int  # planned ones that it passed
    communication: Communication
    bytes: dict[str, int]  # sent, by purpose
    memory: Memory


# --- requests -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Request(Message, Generic[R]):
    """A command to all ranks. `report`: the answer of each on success. A `brief` one overtakes longer ones."""

    report: ClassVar[type[Any]] = Done
    brief: ClassVar[bool] = False

    @property
    def command(self) -> str:
        """Its name for status and errors."""
        return re.sub(r"(?<=.)(?=[A-Z])", "_", type(self).__name__).lower()


@dataclass(frozen=True, kw_only=True)
class Shutdown(Request[Done]):
    """End."""


@dataclass(frozen=True, kw_only=True)
class Import(Request[Imported]):
    """Set the device and import the service: the first step of a start."""

    report: ClassVar[type[Any]] = Imported


@dataclass(frozen=True, kw_only=True)
class Connect(Request[Connected]):
    """Join the process groups."""

    report: ClassVar[type[Any]] = Connected
    port: int  # of the store on loopback that ranks meet in; 0 = a file


@dataclass(frozen=True, kw_only=True)
class Probe(Request[Done]):
    """Send a pattern to every other rank, and check the arrivals."""


@dataclass(frozen=True, kw_only=True)
class Compare(Request[Compared]):
    """Compare shared memory with the devices' own library, and continue with the faster one."""

    report: ClassVar[type[Any]] = Compared


@dataclass(frozen=True, kw_only=True)
class Measure(Request[Ready]):
    """Measure devices and links: the last step of a start."""

    report: ClassVar[type[Any]] = Ready


@dataclass(frozen=True, kw_only=True)
class Cancel(Message):
    """Stop at the next place of the call, and say which the last one was: see `CancelPoints`."""


@dataclass(frozen=True, kw_only=True)
class Arrived(Message):
    """The last place of the call that the rank passes for sure."""

    place: int


@dataclass(frozen=True, kw_only=True)
class Leave(Message):
    """Leave the call at this place, all ranks."""

    place: int


@dataclass(frozen=True, kw_only=True)
class Beat(Message):
    """A sign of life, and how far a rank is in the command that it works on."""

    modules: int = 0  # planned ones that it has entered
    collectives: int = 0  # that it has begun
    loaded: int | None = None  # thousandths of a model; None = it loads none
    has_loaded: bool = False  # it has begun to bring a model to its device in this command
    compiling: int = 0  # the part of a model that it compiles, counted from 1 since its process started; 0 = none


@dataclass(frozen=True, kw_only=True)
class Packed(Request[R]):
    """Brings a value whose tensors ranks may keep: see `tensor_cache`."""

    value: Tree
    drop: tuple[str, ...] | None  # keys of tensors to forget; None = all


@dataclass(frozen=True, kw_only=True)
class Echo(Packed[Value]):
    """Return `x` of the value."""

    report: ClassVar[type[Any]] = Value


@dataclass(frozen=True, kw_only=True)
class Block:
    """Memory of the controller's process: an address as `blocks.SharedBlock` has it, its size in bytes, and whether it is a file on
    a disk, of which a rank maps pages of its own."""

    address: tuple[int, int]
    nbytes: int
    is_file: bool


Region = tuple[int, int, int]
"""Part of a model's memory: the number of a block, where it begins there, and its bytes."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A part of a model's memory that is in a file as well."""

    region: Region
    folder: str  # kind of model folder
    name: str  # of the file in such a folder
    offset: int  # in the file
    digest: str  # BLAKE3 of its bytes


@dataclass(frozen=True, kw_only=True)
class Locate(Request[Located]):
    """Look for parts of the next model that is loaded in this computer's own files."""

    report: ClassVar[type[Any]] = Located
    copies: tuple[Copy, ...]


@dataclass(frozen=True, kw_only=True)
class Load(Request[Loaded]):
    """Hold a model with these weight patches."""

    report: ClassVar[type[Any]] = Loaded
    key: str  # of this state of the model
    name: str  # for people
    network: Tree  # bytes of `comfy.shared.values.packed`
    blocks: tuple[Block, ...]  # memory that its weights are in
    patches: tuple[Tree, ...]  # `comfy.shared.objects.Written.leaves`
    patches_uuid: str
    placement: str = "whole"
    device_bytes: int = 0  # of weights that one rank keeps on its device
    stages: int = 1  # of the model, where it is staged
    shared: int = 0  # blocks of which every rank has a part, where it has others whole; 0 = all
    formats: tuple[str, ...] = ()  # quantised ones that the devices of all ranks multiply in
    roots: tuple[str, ...] = ()  # classes and functions that compute with it, besides its own: by name
    packs: tuple[str, ...] = ()  # paths of node packs to import first
    memory: tuple[int, int] = (0, 0)  # where network and patches lie, for ranks that map it: see `Block`
    memory_nbytes: int = 0  # of these; behind them comes what is sent
    sent: tuple[Region, ...] = ()  # of the blocks, to ranks that cannot map any, and have not located it
    travelled: bool = False  # they go through a pipe: all their bytes are compared, and not samples


@dataclass(frozen=True, kw_only=True)
class Call(Packed[CallReport]):
    """Run a method of a model."""

    report: ClassVar[type[Any]] = CallReport
    key: str
    method: Method
    sequence: SequenceSettings
    ranks: int  # that share the call: the first ones
    batch_degree: int
    by_conditioning: bool  # items of one conditioning stay together
    leading: tuple[str, ...]  # names of the arguments that change with every call
    in_place: tuple[str, ...]  # names of those that ranks leave in the memory of the message
    memory: tuple[float, ...]  # bytes that ComfyUI expects a call to take, with one item, with two, ...; none of pictures
    memory_scale: float  # times these, which the call may need
    compile: CompileSettings | None  # of the blocks; None = they are not compiled
    compile_or_raise: bool  # a block that cannot be compiled is an error
    cancel_every: int  # planned modules between two polls for Cancel; 0 = none
    pipeline: PipelineSettings | None = None  # of a model in stages
    is_repeated: bool = False  # the same may follow once more
    restores: bool = False  # this is the last one, which was given up, in another form
    repeats: bool = False  # this is that one
    natively: bool = False  # in all formats that the device of the only rank multiplies in
    dropped: tuple[int, ...] = ()  # numbers of tensors, noted by patches, that nobody needs any more


@dataclass(frozen=True, kw_only=True)
class Fetch(Request[Value]):
    """Return a tensor that patches have noted."""

    report: ClassVar[type[Any]] = Value
    number: int


@dataclass(frozen=True, kw_only=True)
class AttachNetwork(Request[Done]):
    """Hold a network that patches of other nodes refer to by this key."""

    key: str
    leaves: tuple[Tree, ...]  # `comfy.shared.objects.Written.leaves`
    memory: tuple[int, int]  # where these lie, as of `Load`
    placement: str  # of its weights, as of `Load`: whole, sharded or offloaded


@dataclass(frozen=True, kw_only=True)
class Describe(Request[Described]):
    """Return the hashes of some code, and of a model's."""

    report: ClassVar[type[Any]] = Described
    key: str  # of a model; "" = none
    roots: tuple[str, ...]  # classes and functions by name, besides those of the model
    packs: tuple[str, ...]  # paths of node packs to import first


@dataclass(frozen=True, kw_only=True)
class Drop(Request[Done]):
    """Forget models and networks, and all tensors of calls."""

    brief: ClassVar[bool] = True
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MakeRoom(Request[Done]):
    """Give freed memory of devices back."""

    key: str | None  # of a model that leaves the devices until its next call; None = none does
    ranks: tuple[int, ...]  # that do so


@dataclass(frozen=True, kw_only=True)
class Available(Request[Room]):
    """Return the free memory of the devices, and the formats that they multiply in."""

    report: ClassVar[type[Any]] = Room
    brief: ClassVar[bool] = True


KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        Import, Connect, Probe, Compare, Measure, Shutdown, Cancel, Arrived, Leave, Beat, Echo, Locate, Load, Call, AttachNetwork,
        Describe, Drop, Fetch, MakeRoom, Available,
        Done, Cancelled, Failure, Imported, Connected, Compared, Ready, Value, Located, Loaded, Described, Room, CallReport,
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Header:
    kind: str  # name of its class
    seq: int  # number of the command; 0 = the start
    nbytes: int  # of its tensors
    seconds: float  # that the command may take; 0 = no limit
    fields: dict[str, Any]

    @property
    def message(self) -> Message:
        """The message. Raises ProtocolError: its fields are wrong."""
        try:
            message: Message = decode(KINDS[self.kind], self.fields)
            return message
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a malformed {self.kind}: {error}") from error

    def report(self, rank: int) -> Report:
        """Return the report that it holds. Raises ProtocolError: it holds none, or its fields are wrong."""
        report = self.message
        if not isinstance(report, Report):
            raise ProtocolError(f"rank {rank} sent a {self.kind}, which is no report")
        return report


def pack(message: Message, seq: int = 0, nbytes: int = 0, seconds: float = 0.0) -> bytes:
    """Convert a message to the header of a frame. Raises ProtocolError: it is too long."""
    data = encode({"kind": type(message).__name__, "seq": seq, "nbytes": nbytes, "seconds": seconds, "fields": message})
    if len(data) > MAX_HEADER:
        raise ProtocolError(f"a message header of {len(data)} bytes is above the limit of {MAX_HEADER}")
    return data


def unpack(data: bytes) -> Header:
    """Convert the header of a frame. Raises ProtocolError for what `pack` does not make; the message's fields are not checked
    yet."""
    try:
        header = json.loads(data)
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message header is not JSON: {error}") from error
    if not isinstance(header, dict) or header.keys() != {"kind", "seq", "nbytes", "seconds", "fields"}:
        raise ProtocolError("a message header is not a JSON object with kind, seq, nbytes, seconds and fields")
    kind, fields = header["kind"], header["fields"]
    if not isinstance(kind, str) or kind not in KINDS or not isinstance(fields, dict):
        raise ProtocolError(f"unknown message {str(kind)[:80]!r}")
    if not all(is_number(header[name]) and isinstance(header[name], int) for name in ("seq", "nbytes")):
        raise ProtocolError(f"a message of {str(header['nbytes'])[:80]} bytes, at most {LARGEST:g}")
    if not is_number(header["seconds"]):
        raise ProtocolError(f"a message with {str(header['seconds'])[:80]} seconds, at most {LARGEST:g}")
    return Header(**header)


def all_of(kind: type[R], reports: Sequence[Report]) -> list[R]:
    """Return the reports of all ranks, all of one kind. Raises ProtocolError: one is not."""
    found = []
    for rank, report in enumerate(reports):
        if not isinstance(report, kind):
            raise ProtocolError(f"rank {rank} sent a {type(report).__name__} in place of a {kind.__name__}")
        found.append(report)
    return found
