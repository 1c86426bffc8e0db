"""`RuntimeConfig`, the value that travels along a `CP_CONFIG` link: a validated, immutable description of a pool and of how calls
are split on it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from ..engine.ranks.collectives import native_backend
from ..engine.ranks.config import MAX_SHARE, PipelineSettings, SequenceSettings
from ..engine.ranks.sharding import Shares
from ..errors import bad_value, is_int, shown
from ..system import HAS_MACHINES
from ..system.environment import Own, own_setting
from .settings import MAX_STEP_TIMEOUT, SETTINGS, STAGED, label_of

DEGREES = ("ulysses_degree", "ring_degree", "batch_degree")
CPU_RANKS_PER_CORE = 4  # more than that is a typing error, not a plan
RANKS_PER_ACCELERATOR = 8  # the same, where ranks share one over gloo
ONE_CARD: Final = "CP_TEST_ONE_CARD"
"""Environment variable by which tests have NCCL connect ranks on one GPU: see `launcher.as_host`."""
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")  # a name that ssh knows; never one of its options
_DEVICE = re.compile(r"([a-z]+)(?::(\d{1,3}))?")
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)[af]?")


@dataclass(frozen=True, kw_only=True)
class DeviceInventory:
    """The devices that ranks may run on: torch's device type and how many of them are visible."""

    type: str
    count: int
    too_old: tuple[int, ...] = ()  # numbers of those that torch was built without kernels for
    own: int = 0  # number of the one that ComfyUI itself computes on

    @property
    def usable(self) -> list[int]:
        """Numbers of the accelerators that torch has kernels for."""
        return [number for number in range(self.count) if number not in self.too_old]

    @property
    def max_ranks(self) -> int:
        """One rank per accelerator; on a machine without any, a few CPU ranks per core. Only `devices` can ask for more."""
        return CPU_RANKS_PER_CORE * (os.cpu_count() or 1) if self.type == "cpu" else len(self.usable)

    @property
    def default_ranks(self) -> int:
        """World size when the user leaves it open."""
        return 2 if self.type == "cpu" else max(1, len(self.usable))


def has_code(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether torch, built for these architectures, computes on a CUDA device.

    Binaries ("sm_86") run on later devices of the same major version, other code ("compute_90") on all later ones. Without known
    architectures, as of ROCm, torch computes.
    """
    built = [each for each in map(_ARCHITECTURE.fullmatch, architectures) if each is not None]
    code = [(each[1] == "sm", (int(each[2]), int(each[3]))) for each in built]
    return not code or any(made <= capability and (not binary or made[0] == capability[0]) for binary, made in code)


def split_device(device: str) -> tuple[str, str]:
    """Return (machine, device there); no machine = this one."""
    machine, _, own = device.rpartition("/")
    return machine, own


def check_host(host: object) -> None:
    """Raise ConfigError: a value is no name that ssh could know, or this system has no ranks on other computers."""
    if not (isinstance(host, str) and _HOST.fullmatch(host)):
        allowed = "letters, digits, '.', '_' and '-', with a letter or digit first"
        raise bad_value("host", host, allowed, "Give the name after Host in your ssh configuration: address and user stand there.")
    if not HAS_MACHINES:
        raise bad_value("host", host, "none on this system", "Use Linux or WSL2 on both computers.")


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """A pool and the way calls run on it: what `SETTINGS` say. Build it with `resolve`; two equal configs share one pool."""

    devices: tuple[str, ...]
    sequence: SequenceSettings
    batch_degree: int
    backend: str
    on_unsupported: str
    step_timeout: float
    weights: str
    memory_per_rank: float
    shares: Shares
    ranks_per_call: str
    pipeline: PipelineSettings | None = None  # of calls in patches

    def __post_init__(self) -> None:
        stages = None if self.pipeline is None else self.pipeline.stages
        if stages is not None and (stages < 2 or self.world_size % stages):
            allowed = f"a number from 2 that divides the {self.world_size} ranks"
            raise bad_value("stages", stages, allowed, "Change it, or the number of GPUs.")
        given = {"ulysses_degree": self.sequence.ulysses_degree, "ring_degree": self.sequence.ring_degree}
        for name, degree in (given | {"batch_degree": self.batch_degree}).items():
            if degree > 1 and self.in_stages:
                remedy = "Set the degrees to 0: stages take their place."
                raise bad_value(name, degree, "0 or 1 where the model is staged", remedy)

    @property
    def in_stages(self) -> bool:
        """Whether the config says that the model's blocks are divided into stages."""
        return self.pipeline is not None or self.weights == STAGED

    @property
    def staged(self) -> PipelineSettings:
        """How calls of a staged model pass through its stages."""
        return self.pipeline or PipelineSettings(stages=self.world_size)

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that compute the same blocks, if the config says so; else all."""
        return self.world_size // (self.staged.stages if self.in_stages else 1)

    @property
    def chooses_ranks(self) -> bool:
        """Whether a call may run on fewer ranks than there are. Given degrees are obeyed."""
        given = self.sequence.ring_degree or self.sequence.ulysses_degree or self.batch_degree
        return self.ranks_per_call == "auto" and not given

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def local(self) -> tuple[str, ...]:
        """The devices of this machine, which come first."""
        return tuple(device for device in self.devices if "/" not in device)

    @property
    def machines(self) -> tuple[str, ...]:
        """The machine of every rank; this one has no name."""
        return tuple(split_device(device)[0] for device in self.devices)

    @property
    def device_type(self) -> str:
        return self.devices[0].partition(":")[0]

    @property
    def native(self) -> str:
        """The devices' own library, if ranks are to communicate by it; empty = by gloo."""
        backend = native_backend(self.device_type) if self.backend == "auto" else self.backend
        return backend if self.world_size > 1 and backend != "gloo" else ""

    @property
    def shares_accelerators(self) -> bool:
        """Whether ranks share an accelerator: that checks results, and takes longer than one rank alone."""
        return self.device_type != "cpu" and len(set(self.devices)) < len(self.devices)

    @classmethod
    def resolve(cls, *, inventory: DeviceInventory, **given: Any) -> RuntimeConfig:
        """Check every input (see `SETTINGS`) against the machine and the other inputs, and fill in what was left open (0 or empty).
        Raises ConfigError: naming the input, its value, what is allowed and what to do. No process has started by then."""
        if unknown := given.keys() - SETTINGS.keys():
            raise TypeError(f"there is no setting {', '.join(sorted(unknown))}")
        values = {name: given.get(name, setting.default) for name, setting in SETTINGS.items()}
        for name, setting in SETTINGS.items():
            setting.check(name, values[name])
        devices = _resolve_devices(values.pop("world_size"), values["devices"], values["backend"], inventory)
        ring, ulysses, batch = _resolve_degrees(len(devices), *(values[name] for name in DEGREES))
        allowed = ("auto", *dict.fromkeys((native_backend(inventory.type), "gloo")))
        if values["backend"] not in allowed:
            words = f"{', '.join(allowed)} on {inventory.type} devices"
            raise bad_value("backend", values["backend"], words, "Choose auto: it is for other devices.")
        values |= {"devices": devices, "ring_degree": ring, "ulysses_degree": ulysses, "batch_degree": batch}
        for name in ("step_timeout", "memory_per_rank"):
            values[name] = float(values[name])
        values["shares"] = _resolve_shares(values["shares"], len(devices))
        names = [each.name for each in fields(SequenceSettings) if each.name in values]
        return cls(sequence=SequenceSettings(**{name: values.pop(name) for name in names}), **values)


def _resolve_shares(shares: str, ranks: int) -> Shares:
    """Return one whole number per rank, parsed from the text; none where it is empty."""
    if isinstance(shares, str) and not shares.strip():
        return ()
    parts = [part.strip() for part in shares.replace(":", ",").split(",")] if isinstance(shares, str) else []
    if len(parts) != ranks or not all(
        part.isascii() and part.isdigit() and len(part) < 9 and 1 <= int(part) <= MAX_SHARE for part in parts
    ):
        raise bad_value(
            "shares",
            shares,
            f"a whole number from 1 to {MAX_SHARE} for each of the {ranks} ranks, such as {','.join(['2', *'1' * (ranks - 1)])}",
            "Leave it empty: unequal devices are measured.",
        )
    return tuple(map(int, parts))


def _resolve_devices(world_size: int, devices: str, backend: str, inventory: DeviceInventory) -> tuple[str, ...]:
    if not isinstance(devices, str):
        raise bad_value("devices", devices, "a text such as 'cuda:0,cuda:2'", "Leave it empty for the first devices.")
    # Ranks share an accelerator only where `devices` says so: a number alone is more likely a mistake.
    shared_by = ("gloo", "nccl") if own_setting(ONE_CARD) == "1" else ("gloo",)
    sharing = bool(devices.strip()) and backend in shared_by and inventory.type != "cpu"
    limit = inventory.max_ranks * (RANKS_PER_ACCELERATOR if sharing else 1)
    if not is_int(world_size) or not 0 <= world_size <= limit:
        raise bad_value("world_size", world_size, f"0 (choose) to {limit}. {_visible(inventory)}", "Set it to 0.")
    names = tuple(_parse_device(part.strip(), devices, inventory) for part in devices.split(",")) if devices.strip() else ()
    if not names:
        count = world_size or inventory.default_ranks
        numbers = inventory.usable or [0]
        return tuple("cpu" if inventory.type == "cpu" else f"{inventory.type}:{numbers[i]}" for i in range(count))
    if world_size not in (0, len(names)):
        raise bad_value("world_size", world_size, f"0 or {len(names)}, as many as are named", "Set it to 0.")
    if "/" in names[0]:
        raise bad_value("devices", devices, "a device of this computer first", "Rank 0 is on the computer with ComfyUI.")
    places = [split_device(name)[0] for name in names]
    names = tuple(sorted(names, key=lambda name: places.index(split_device(name)[0])))  # ranks of a machine are neighbours
    if inventory.type != "cpu" and not sharing and len(set(names)) != len(names):
        raise bad_value(
            "devices",
            devices,
            f"each device once; with gloo as {label_of('backend')} ranks can share an accelerator, to check results: it is slow",
            "Name each device once.",
        )
    own = f"{inventory.type}:{inventory.own}"
    if inventory.type != "cpu" and len(names) == 1 and names != (own,):  # no rank computes then
        allowed = f"with one entry {own}, which ComfyUI itself computes on"
        raise bad_value("devices", devices, allowed, "Name several, or start ComfyUI on that one.")
    if sum("/" not in name for name in names) > limit:
        raise bad_value("devices", devices, f"at most {limit} entries on this machine", "Name fewer devices.")
    return names


def _parse_device(text: str, devices: str, inventory: DeviceInventory) -> str:
    if "/" in text:
        host, device = split_device(text)
        there = _DEVICE.fullmatch(device)
        if not (_HOST.fullmatch(host) and there and there[1] == inventory.type):
            allowed = f"of other computers host/{inventory.type}:0, by a name that ssh knows; {shown(text)} is none of them"
            raise bad_value("devices", devices, allowed, "Name the host as in your ssh configuration, and one of its devices.")
        if not HAS_MACHINES:
            raise bad_value("devices", devices, "devices of this computer, on this system", "Use Linux or WSL2 on both.")
        return text
    cpu = inventory.type == "cpu"
    match = _DEVICE.fullmatch(text)
    index = int(match[2] or 0) if match else 0
    if match is None or match[1] != inventory.type or (index >= inventory.count and not cpu):
        last = f"{inventory.type}:{inventory.count - 1}"
        allowed = "cpu, once per rank" if cpu else f"{inventory.type}:0" + (f" to {last}" if inventory.count > 1 else "")
        raise bad_value(
            "devices",
            devices,
            f"{allowed}, separated by commas; {shown(text)} is none of them. {_visible(inventory)}",
            "Leave it empty to use the first ones.",
        )
    if index in inventory.too_old:
        raise bad_value(
            "devices", devices, "devices that ComfyUI's torch has kernels for", f"{text} is too old for it: leave it out."
        )
    return "cpu" if cpu else f"{inventory.type}:{index}"


def _visible(inventory: DeviceInventory) -> str:
    """Return the devices of the machine, including those hidden from ComfyUI."""
    if inventory.type == "cpu":
        return (
            "ComfyUI runs on the CPU: it was started with --cpu, its torch has no support for the GPUs, or "
            f"CUDA_VISIBLE_DEVICES hides them. Ranks are CPU processes then, {CPU_RANKS_PER_CORE} per core at most"
        )
    return f"ComfyUI sees {inventory.count} {inventory.type} device(s)"


def _resolve_degrees(world_size: int, ulysses: int, ring: int, batch: int) -> tuple[int, int, int]:
    """Return (ring, ulysses, batch). 0 = the ranks choose; ring and ulysses are both 0 or neither is."""
    for name, value in zip(DEGREES, (ulysses, ring, batch), strict=True):
        if not is_int(value) or value < 0:
            raise bad_value(name, value, "a whole number from 0 (choose)", "Set it to 0.")
    if not (ulysses or ring or batch):
        return 0, 0, 0
    # What is left open takes the rest: first the sequence axes, then the batch axis.
    rest = max(1, world_size // math.prod(degree or 1 for degree in (ulysses, ring, batch)))
    if not (ulysses or ring):
        chosen, factors = (0, 0, batch), [rest, batch]
    else:
        chosen = ring or (rest if ulysses else 1), ulysses or rest, batch or (rest if ulysses and ring else 1)
        factors = [chosen[1], chosen[0], chosen[2]]
    if math.prod(factors) != world_size:
        raise bad_value(
            "ulysses_degree x ring_degree x batch_degree",
            f"{' x '.join(map(str, factors))} = {math.prod(factors)}",
            f"a product equal to the world size, {world_size}",
            "Set the degrees to 0 to have them chosen.",
        )
    return chosen


TIMEOUTS: dict[Own, tuple[float, float]] = {
    "CP_STARTUP_TIMEOUT": (300.0, 0.0),
    "CP_CONNECT_TIMEOUT": (60.0, 5.0),
    "CP_LOAD_TIMEOUT": (1800.0, 0.0),
}
"""Seconds that ranks may take, and more for each rank, by environment variable: to start; to connect over their devices' library,
before they try another; to load a model, and for a call in which they bring it to their devices."""


def timeout_of(name: Own, ranks: int) -> float:
    """Return one of TIMEOUTS, as the environment says or by default; empty counts as not set. Read when needed: a bad value must
    not stop an import. Raises ConfigError: it is not a number, or out of range."""
    text, (seconds, more) = own_setting(name).strip(), TIMEOUTS[name]
    default = seconds + more * ranks
    try:
        value = float(text or default)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_STEP_TIMEOUT:
        raise bad_value(
            f"environment variable {name}",
            text,
            f"seconds above 0 and up to {MAX_STEP_TIMEOUT:.0f}; without it {default:g} holds",
            "Correct or unset it, and restart ComfyUI.",
        )
    return value


@dataclass(frozen=True, kw_only=True)
class WorkerSite:
    """The code that ranks run, as plain data for JSON."""

    service: str = ""  # module of this package that makes the service of every rank (see `worker`); empty = none
    path: tuple[str, ...] = ()  # folders in front of `sys.path`
    # Modules to import before a rank knows its device, so they must not open one.
    preload: tuple[str, ...] = ("torch",)
    argv: tuple[str, ...] = ("",)  # command line that the code in the ranks sees
