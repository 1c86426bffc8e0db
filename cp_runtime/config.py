"""Settings: what a user asks for, and what it resolves to on this machine.

`ContextParallelConfig` has the fields of diffusers' class of that name. `RuntimeConfig` is the value that travels along a
`CP_CONFIG` link: a validated, immutable description of the pool and of how calls are sharded.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from .errors import bad_value

if TYPE_CHECKING:
    from .mesh import SequenceMesh

ROTATE_METHODS = ("alltoall", "allgather")
BACKENDS = ("auto", "nccl", "gloo", "xccl", "hccl")
ON_UNSUPPORTED = ("error", "single device")
MAX_STEP_TIMEOUT = 7 * 24 * 3600.0
MAX_RANKS = 1024  # that can be asked for
DEFAULT_STEP_TIMEOUT = 600.0
CPU_RANKS_PER_CORE = 4  # more than that is a typing error, not a plan

_DEVICE = re.compile(r"([a-z]+)(?::(\d{1,3}))?")


@dataclass(frozen=True, kw_only=True)
class ContextParallelConfig:
    """How a sequence is split over ranks. Names and meanings are those of diffusers 0.42; what it refuses works here.

    The axes are `ring` x `ulysses`, ulysses inner; their product is the number of ranks. 1 x 1 changes nothing.

    Args:
        ring_degree: ranks that pass keys and values around; None = 1.
        ulysses_degree: ranks that exchange sequence shards for head shards; None = 1.
        convert_to_fp32: merge partial results of ring steps in float32.
        rotate_method: how ring attention moves keys and values: "alltoall", from neighbour to neighbour while it computes, or
            "allgather", all at once.
        mesh: DeviceMesh with the axes "ring" and "ulysses", in this order, and any others; None = all ranks.
        ulysses_anything: allow lengths and head counts that do not divide by `ulysses_degree` (exact either way).
        ring_anything: allow lengths that do not divide by `ring_degree`.

    Raises:
        ConfigError: naming field, value, what is allowed and what to do.
    """

    ring_degree: int | None = None
    ulysses_degree: int | None = None
    convert_to_fp32: bool = True
    rotate_method: Literal["alltoall", "allgather"] = "allgather"
    mesh: Any = field(default=None, compare=False)
    ulysses_anything: bool = False
    ring_anything: bool = False

    def __post_init__(self) -> None:
        for name in ("ring_degree", "ulysses_degree"):
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, 1)
            elif not _is_int(value) or value < 1:
                raise bad_value(name, value, "a whole number from 1", "Set it to the number of ranks on that axis.")
        if self.rotate_method not in ROTATE_METHODS:
            raise bad_value("rotate_method", self.rotate_method, " or ".join(ROTATE_METHODS), "Choose one of them.")
        for name in ("convert_to_fp32", "ulysses_anything", "ring_anything"):
            if not isinstance(getattr(self, name), bool):
                raise bad_value(name, getattr(self, name), "True or False", "Set it to one of them.")

    @property
    def mesh_shape(self) -> tuple[int, int]:
        """Sizes of the axes, outermost first."""
        return self.ring_degree or 1, self.ulysses_degree or 1

    @property
    def mesh_dim_names(self) -> tuple[str, str]:
        """Names of the axes, outermost first."""
        return "ring", "ulysses"

    def setup(self, rank: int, world_size: int, device: torch.device | str, mesh: Any = None) -> None:
        """Attach the process groups. `apply_context_parallel` does it for the default process group if nobody did.

        Args:
            rank: this process's rank in the default group.
            world_size: number of ranks there.
            device: where tensors of this rank lie.
            mesh: DeviceMesh; None = the config's own, or all ranks.

        Raises:
            ConfigError: the degrees do not fit the ranks or the mesh.
        """
        from .mesh import SequenceMesh

        ring, ulysses = self.mesh_shape
        mesh = mesh if mesh is not None else self.mesh
        if mesh is None and ring * ulysses != world_size:
            raise bad_value(
                "ring_degree x ulysses_degree",
                f"{ring} x {ulysses} = {ring * ulysses}",
                f"a product equal to the world size, {world_size}",
                "Change a degree, start as many ranks, or pass a mesh with more axes.",
            )
        sequence = SequenceMesh.from_device_mesh(mesh) if mesh is not None else SequenceMesh(dist.group.WORLD)
        if mesh is not None and (mesh["ring"].size(), mesh["ulysses"].size()) != (ring, ulysses):
            raise bad_value(
                "mesh",
                f"ring {mesh['ring'].size()} x ulysses {mesh['ulysses'].size()}",
                f"axes of the sizes ring_degree {ring} and ulysses_degree {ulysses}",
                "Make the mesh and the degrees agree.",
            )
        if not 0 <= rank < world_size:
            raise bad_value("rank", rank, f"0 to {world_size - 1}", "Pass torch.distributed.get_rank().")
        object.__setattr__(self, "_sequence", sequence)

    @property
    def sequence(self) -> SequenceMesh | None:
        """The ranks that share the sequence, after `setup`."""
        return getattr(self, "_sequence", None)

    @classmethod
    def of(cls, config: Any) -> ContextParallelConfig:
        """Take a config of this package or of diffusers, bare or inside a ParallelConfig.

        Raises:
            ConfigError: it is something else, or asks for another parallelism.
        """
        if getattr(config, "tensor_parallel_config", None) is not None:
            raise bad_value("tensor_parallel_config", "a TensorParallelConfig", "None", "Apply one kind of parallelism here.")
        config = getattr(config, "context_parallel_config", config)
        if isinstance(config, cls):
            return config
        try:
            return cls(**{f.name: getattr(config, f.name) for f in dataclasses.fields(cls)})
        except AttributeError as error:
            raise bad_value(
                "parallel_config", config, "a ContextParallelConfig or ParallelConfig", f"Build one of them ({error})."
            ) from None


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """What `apply_context_parallel` takes, as in diffusers: a context parallel config by that name."""

    context_parallel_config: ContextParallelConfig

    def setup(self, rank: int, world_size: int, device: torch.device | str, *, mesh: Any = None) -> None:
        """See `ContextParallelConfig.setup`."""
        self.context_parallel_config.setup(rank, world_size, device, mesh)


@dataclass(frozen=True, kw_only=True)
class DeviceInventory:
    """The devices that ranks may run on: torch's device type and how many of them are visible."""

    type: str
    count: int

    @property
    def max_ranks(self) -> int:
        """One rank per accelerator; on a machine without any, a few CPU ranks per core."""
        return CPU_RANKS_PER_CORE * (os.cpu_count() or 1) if self.type == "cpu" else self.count

    @property
    def default_ranks(self) -> int:
        """World size when the user leaves it open."""
        return 2 if self.type == "cpu" else max(1, self.count)


@dataclass(frozen=True, kw_only=True)
class SequenceSettings:
    """What a user asks for on the sequence axes: the fields of `ContextParallelConfig`, with degrees that may be left open.

    Args:
        ring_degree, ulysses_degree: both 0 = chosen for every attention, by the cost model (`cost`).
    """

    ring_degree: int = 0
    ulysses_degree: int = 0
    convert_to_fp32: bool = True
    rotate_method: Literal["alltoall", "allgather"] = "alltoall"
    ulysses_anything: bool = True
    ring_anything: bool = True

    def with_degrees(self, ring: int, ulysses: int) -> ContextParallelConfig:
        """The same settings with these degrees."""
        return ContextParallelConfig(**{**dataclasses.asdict(self), "ring_degree": ring, "ulysses_degree": ulysses})


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """A pool and the way calls run on it. Build it with `resolve`; two equal configs share one pool.

    Args:
        batch_degree: groups of ranks that share out CFG halves and batch items; 0 = chosen for every call (see `batch`).
    """

    devices: tuple[str, ...]
    sequence: SequenceSettings
    batch_degree: int = 0
    backend: str = "auto"
    on_unsupported: str = "error"
    step_timeout: float = DEFAULT_STEP_TIMEOUT

    @property
    def world_size(self) -> int:
        """Number of worker ranks."""
        return len(self.devices)

    @property
    def device_type(self) -> str:
        """Torch device type of all ranks."""
        return self.devices[0].partition(":")[0]

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
    ) -> RuntimeConfig:
        """Check every input against the machine and the other inputs, and fill in what was left open (0 or empty).

        Raises:
            ConfigError: naming the input, its value, what is allowed and what to do. No process has started by then.
        """
        names = _resolve_devices(world_size, devices, inventory)
        ring, ulysses, batch = _resolve_degrees(len(names), ulysses_degree, ring_degree, batch_degree)
        if backend not in BACKENDS:
            raise bad_value("backend", backend, ", ".join(BACKENDS), "Leave it at auto unless you know better.")
        if backend == "nccl" and inventory.type != "cuda":
            raise bad_value("backend", backend, f"auto or gloo on {inventory.type} devices", "nccl needs CUDA devices.")
        if on_unsupported not in ON_UNSUPPORTED:
            raise bad_value("on_unsupported", on_unsupported, " or ".join(ON_UNSUPPORTED), "Choose one of them.")
        timeout = step_timeout if isinstance(step_timeout, (int, float)) and not isinstance(step_timeout, bool) else math.nan
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
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _resolve_devices(world_size: int, devices: str, inventory: DeviceInventory) -> tuple[str, ...]:
    limit = inventory.max_ranks
    if not _is_int(world_size) or not 0 <= world_size <= limit:
        raise bad_value("world_size", world_size, f"0 (choose) to {limit}", _remedy("Lower it", inventory))
    if not isinstance(devices, str):
        raise bad_value("devices", devices, "a text such as 'cuda:0,cuda:2'", "Leave it empty for the first devices.")
    names = tuple(_parse_device(part.strip(), devices, inventory) for part in devices.split(",")) if devices.strip() else ()
    if not names:
        count = world_size or inventory.default_ranks
        return tuple("cpu" if inventory.type == "cpu" else f"{inventory.type}:{i}" for i in range(count))
    if world_size not in (0, len(names)):
        raise bad_value("world_size", world_size, f"0 or {len(names)}, the number of entries in devices", "Make them agree.")
    if len(names) > limit:
        raise bad_value("devices", devices, f"at most {limit} entries on this machine", "Name fewer devices.")
    if inventory.type != "cpu" and len(set(names)) != len(names):
        raise bad_value("devices", devices, "each device once", "Two ranks cannot share an accelerator.")
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
        raise bad_value("devices", devices, f"names with commas between them: {allowed}; {text!r} is none of them", remedy)
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
        if not _is_int(value) or value < 0:
            raise bad_value(name, value, "a whole number from 0 (choose)", "Leave it at 0.")
    if not (ulysses or ring or batch):
        return 0, 0, 0
    # What is left open takes the rest: first the sequence axes, then the batch axis.
    rest = max(1, world_size // math.prod(degree or 1 for degree in (ulysses, ring, batch)))
    if not (ulysses or ring):
        product, shown = batch * rest, f"{rest} x {batch}"
        chosen = 0, 0, batch
    else:
        ring_, ulysses_ = ring or (rest if ulysses else 1), ulysses or rest
        batch_ = batch or (rest if ulysses and ring else 1)
        product, shown = ulysses_ * ring_ * batch_, f"{ulysses_} x {ring_} x {batch_}"
        chosen = ring_, ulysses_, batch_
    if product != world_size:
        raise bad_value(
            "ulysses_degree x ring_degree x batch_degree",
            f"{shown} = {product}",
            f"a product equal to the world size, {world_size}",
            "Leave the degrees at 0 to have them chosen.",
        )
    return chosen
