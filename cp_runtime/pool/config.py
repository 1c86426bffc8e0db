"""`RuntimeConfig`, the value that travels along a `CP_CONFIG` link: a validated, immutable description of a pool and of how calls
are split on it."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass

from ..engine.config import MAX_SHARE, SequenceSettings, is_int
from ..engine.sharding import Shares
from ..errors import bad_value, shown

BACKENDS = ("auto", "nccl", "gloo", "xccl", "hccl")
ON_UNSUPPORTED = ("error", "single device")
WEIGHTS = ("auto", "whole", "sharded", "offloaded")
WHOLE, SHARDED, OFFLOADED = PLACEMENTS = WEIGHTS[1:]
"""Where ranks keep a model's weights: all on every device; 1/N on each; 1/N in the host's memory for each."""
RANKS_PER_CALL = ("auto", "all")
MAX_MEMORY = 1 << 20  # GB; more is a typing error
MAX_STEP_TIMEOUT = 7 * 24 * 3600.0
MAX_RANKS = 1024  # that can be asked for
DEFAULT_STEP_TIMEOUT = 600.0
CPU_RANKS_PER_CORE = 4  # more than that is a typing error, not a plan
RANKS_PER_ACCELERATOR = 8  # the same, where ranks share one over gloo
ONE_CARD = "CP_TEST_ONE_CARD"
"""Environment variable by which tests have NCCL connect ranks on one GPU: see `launcher.as_host`."""
_DEVICE = re.compile(r"([a-z]+)(?::(\d{1,3}))?")


@dataclass(frozen=True, kw_only=True)
class DeviceInventory:
    """The devices that ranks may run on: torch's device type and how many of them are visible."""

    type: str
    count: int

    @property
    def max_ranks(self) -> int:
        """One rank per accelerator; on a machine without any, a few CPU ranks per core. Only `devices` can ask for more."""
        return CPU_RANKS_PER_CORE * (os.cpu_count() or 1) if self.type == "cpu" else self.count

    @property
    def default_ranks(self) -> int:
        """World size when the user leaves it open."""
        return 2 if self.type == "cpu" else max(1, self.count)


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """A pool and the way calls run on it. Build it with `resolve`; two equal configs share one pool.

    Args:
        batch_degree: groups of ranks that share out CFG halves and batch items; 0 = chosen for every call (see `batch`).
        weights: where the ranks keep a model: whole on every device, 1/N of it on each (sharded), or 1/N in the host's memory
            for each (offloaded); auto = the first of these that fits.
        memory_per_rank: GB of a device that a rank may use; 0 = what is free.
        shares: how much of the work each rank takes, by rank; empty = equal for devices of one kind, by measured speed for others.
        ranks_per_call: auto = as many ranks compute a call as make it fastest, if no degree is given; all = all of them.
    """

    devices: tuple[str, ...]
    sequence: SequenceSettings
    batch_degree: int = 0
    backend: str = "auto"
    on_unsupported: str = "error"
    step_timeout: float = DEFAULT_STEP_TIMEOUT
    weights: str = "auto"
    memory_per_rank: float = 0.0
    shares: Shares = ()
    ranks_per_call: str = "auto"

    @property
    def chooses_ranks(self) -> bool:
        """Whether a call may run on fewer ranks than there are. Given degrees are obeyed."""
        given = self.sequence.ring_degree or self.sequence.ulysses_degree or self.batch_degree
        return self.ranks_per_call == "auto" and not given

    @property
    def world_size(self) -> int:
        """Number of worker ranks."""
        return len(self.devices)

    @property
    def device_type(self) -> str:
        """Torch device type of all ranks."""
        return self.devices[0].partition(":")[0]

    @property
    def uses_nccl(self) -> bool:
        """Whether ranks are to communicate over NCCL."""
        return self.world_size > 1 and (self.backend == "nccl" or (self.backend == "auto" and self.device_type == "cuda"))

    @property
    def shares_accelerators(self) -> bool:
        """Whether ranks share an accelerator: that checks results, and takes longer than one rank alone."""
        return self.device_type != "cpu" and len(set(self.devices)) < len(self.devices)

    @classmethod
    def resolve(
        cls,
        *,
        inventory: DeviceInventory,
        world_size: int = 0,
        devices: str = "",
        ulysses_degree: int = 0,
        ring_degree: int = 0,
        batch_degree: int = 0,
        rotate_method: str = "alltoall",
        convert_to_fp32: bool = True,
        ulysses_anything: bool = True,
        ring_anything: bool = True,
        backend: str = "auto",
        on_unsupported: str = "error",
        step_timeout: float = DEFAULT_STEP_TIMEOUT,
        weights: str = "auto",
        memory_per_rank: float = 0.0,
        shares: str = "",
        ranks_per_call: str = "auto",
    ) -> RuntimeConfig:
        """Check every input against the machine and the other inputs, and fill in what was left open (0 or empty).

        Raises:
            ConfigError: naming the input, its value, what is allowed and what to do. No process has started by then.
        """
        if backend not in BACKENDS:
            raise bad_value("backend", backend, ", ".join(BACKENDS), "Leave it at auto unless you know better.")
        names = _resolve_devices(world_size, devices, backend, inventory)
        ring, ulysses, batch = _resolve_degrees(len(names), ulysses_degree, ring_degree, batch_degree)
        if backend == "nccl" and inventory.type != "cuda":
            raise bad_value("backend", backend, f"auto or gloo on {inventory.type} devices", "nccl needs CUDA devices.")
        if on_unsupported not in ON_UNSUPPORTED:
            raise bad_value("on_unsupported", on_unsupported, " or ".join(ON_UNSUPPORTED), "Choose one of them.")
        if weights not in WEIGHTS:
            raise bad_value("weights", weights, ", ".join(WEIGHTS), "Leave it at auto unless you know better.")
        memory = _number(memory_per_rank)
        if not 0 <= memory <= MAX_MEMORY:
            raise bad_value(
                "memory_per_rank",
                memory_per_rank,
                f"GB from 0 (what is free) to {MAX_MEMORY}",
                "Set it to what a rank may use of its device.",
            )
        if ranks_per_call not in RANKS_PER_CALL:
            raise bad_value("ranks_per_call", ranks_per_call, " or ".join(RANKS_PER_CALL), "Choose one of them.")
        timeout = _number(step_timeout)
        if not 0 < timeout <= MAX_STEP_TIMEOUT:
            raise bad_value(
                "step_timeout",
                step_timeout,
                f"seconds above 0 and up to {MAX_STEP_TIMEOUT:.0f}",
                "Set it well above the time of one sampling step.",
            )
        sequence = SequenceSettings(
            ring_degree=ring,
            ulysses_degree=ulysses,
            convert_to_fp32=convert_to_fp32,
            rotate_method=rotate_method,  # type: ignore[arg-type]  # checked below
            ulysses_anything=ulysses_anything,
            ring_anything=ring_anything,
        )
        sequence.with_degrees(1, 1)  # checks every field
        return cls(
            devices=names,
            sequence=sequence,
            batch_degree=batch,
            backend=backend,
            on_unsupported=on_unsupported,
            step_timeout=float(timeout),
            weights=weights,
            memory_per_rank=float(memory),
            shares=_resolve_shares(shares, len(names)),
            ranks_per_call=ranks_per_call,
        )


def _number(value: object) -> float:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _resolve_shares(shares: str, ranks: int) -> Shares:
    """What the text says, one whole number for each rank; none where it is empty."""
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
    shared_by = ("gloo", "nccl") if os.environ.get(ONE_CARD) == "1" else ("gloo",)
    sharing = bool(devices.strip()) and backend in shared_by and inventory.type != "cpu"
    limit = inventory.max_ranks * (RANKS_PER_ACCELERATOR if sharing else 1)
    if not is_int(world_size) or not 0 <= world_size <= limit:
        raise bad_value("world_size", world_size, f"0 (choose) to {limit}", _remedy("Lower it", inventory))
    names = tuple(_parse_device(part.strip(), devices, inventory) for part in devices.split(",")) if devices.strip() else ()
    if not names:
        count = world_size or inventory.default_ranks
        return tuple("cpu" if inventory.type == "cpu" else f"{inventory.type}:{i}" for i in range(count))
    if world_size not in (0, len(names)):
        raise bad_value("world_size", world_size, f"0 or {len(names)}, the number of entries in devices", "Make them agree.")
    if inventory.type != "cpu" and not sharing and len(set(names)) != len(names):
        raise bad_value(
            "devices",
            devices,
            "each device once",
            "Ranks can share an accelerator with backend=gloo, to check results: it is slow.",
        )
    if len(names) > limit:
        raise bad_value("devices", devices, f"at most {limit} entries on this machine", "Name fewer devices.")
    return names


def _parse_device(text: str, devices: str, inventory: DeviceInventory) -> str:
    """One entry of `devices`."""
    cpu = inventory.type == "cpu"
    match = _DEVICE.fullmatch(text)
    index = int(match[2] or 0) if match else 0
    if match is None or match[1] != inventory.type or (index >= inventory.count and not cpu):
        last = f"{inventory.type}:{inventory.count - 1}"
        allowed = "cpu, once per rank" if cpu else f"{inventory.type}:0" + (f" to {last}" if inventory.count > 1 else "")
        remedy = _remedy("Leave it empty for the first ones", inventory)
        raise bad_value("devices", devices, f"names with commas between them: {allowed}; {shown(text)} is none of them", remedy)
    return "cpu" if cpu else f"{inventory.type}:{index}"


def _remedy(advice: str, inventory: DeviceInventory) -> str:
    """The advice, and what the machine has: users ask for devices that ComfyUI does not see."""
    if inventory.type == "cpu":
        return (
            f"{advice}. ComfyUI runs on the CPU: it was started with --cpu, its torch has no support for the GPUs, or "
            f"CUDA_VISIBLE_DEVICES hides them. Ranks are CPU processes then, {CPU_RANKS_PER_CORE} per core at most."
        )
    return f"{advice}. ComfyUI sees {inventory.count} {inventory.type} device(s)."


def _resolve_degrees(world_size: int, ulysses: int, ring: int, batch: int) -> tuple[int, int, int]:
    """(ring, ulysses, batch); 0 where the ranks are to choose: ring and ulysses both or neither."""
    for name, value in (("ulysses_degree", ulysses), ("ring_degree", ring), ("batch_degree", batch)):
        if not is_int(value) or value < 0:
            raise bad_value(name, value, "a whole number from 0 (choose)", "Leave it at 0.")
    if not (ulysses or ring or batch):
        return 0, 0, 0
    # What is left open takes the rest: first the sequence axes, then the batch axis.
    rest = max(1, world_size // math.prod(degree or 1 for degree in (ulysses, ring, batch)))
    if not (ulysses or ring):
        product, factors = batch * rest, f"{rest} x {batch}"
        chosen = 0, 0, batch
    else:
        ring_, ulysses_ = ring or (rest if ulysses else 1), ulysses or rest
        batch_ = batch or (rest if ulysses and ring else 1)
        product, factors = ulysses_ * ring_ * batch_, f"{ulysses_} x {ring_} x {batch_}"
        chosen = ring_, ulysses_, batch_
    if product != world_size:
        raise bad_value(
            "ulysses_degree x ring_degree x batch_degree",
            f"{factors} = {product}",
            f"a product equal to the world size, {world_size}",
            "Leave the degrees at 0 to have them chosen.",
        )
    return chosen
