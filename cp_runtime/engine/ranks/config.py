"""Settings for splitting a sequence or a model over ranks. `ContextParallelConfig` and `ParallelConfig` have the fields of
diffusers' classes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ConfigError, bad_value, check_choice, check_switch, is_int
from .mesh import AXES, BatchMesh, SequenceMesh, how_to_make_a_mesh
from .sharding import Shares

EXACT, EIGHT_BIT = EXCHANGES = ("exact", "8 bit")
ROTATE_METHODS = ("alltoall", "allgather")
MAX_SHARE = 100  # finer shares are no more accurate
NOT_OF_DIFFUSERS = (
    "batch_degree", "shares", "ulysses_rounds", "exchange", "pipefusion_degree", "num_pipeline_patch", "warmup_steps",
)  # fmt: skip
DEGREES = {
    "ring_degree": "ranks on that axis",
    "ulysses_degree": "ranks on that axis",
    "batch_degree": "groups of ranks",
    "pipefusion_degree": "stages",
}


class _NotOfDiffusers:
    @property
    def tensor_parallel_config(self) -> None:
        """Raise ConfigError. Only enable_parallelism and from_pretrained of diffusers read this."""
        raise ConfigError(
            "parallel_config: got a config of cp_runtime; allowed in diffusers' enable_parallelism and from_pretrained: diffusers' "
            "own. Load the model without parallel_config, and call cp_runtime.apply_context_parallel(model, config)."
        )


@dataclass(frozen=True)
class ContextParallelConfig(_NotOfDiffusers):
    """Settings for splitting a sequence over ranks. Names and meanings are those of diffusers 0.42; settings that it refuses work
    here.

    The axes are `ring` x `ulysses`, ulysses inner; their product with `batch_degree` is the number of ranks. 1 x 1 changes nothing.

    Args:
        ring_degree: ranks that pass keys and values around; None = as the mesh says, 1 without one.
        ulysses_degree: ranks that exchange sequence shards for head shards; None = as the mesh says, 1 without one.
        convert_to_fp32: merge partial results of ring steps in float32.
        rotate_method: how ring attention moves keys and values: "alltoall", from neighbour to neighbour while it computes, or
            "allgather", all at once.
        mesh: DeviceMesh with the axes "ring" and "ulysses", in this order, and any others; None = all ranks.
        ulysses_anything: allow lengths and head counts that do not divide by `ulysses_degree` (exact either way).
        ring_anything: allow lengths that do not divide by `ring_degree`.
        batch_degree: groups of ranks that compute items of a batch at the same time, each of them ring x ulysses ranks. A call of
            fewer items is shared by all ranks: the degree of the batch is then one of ulysses. Not in diffusers.
        shares: how much of the tokens, heads and items each rank takes, by rank: (2, 1) where rank 0 is twice as fast as rank 1.
            Any shares give exact results. They must be the same on every rank. None = all take as much. Not in diffusers.
        ulysses_rounds: parts of its heads that a rank exchanges one after the other, so that one travels while another attends: 2
            to 4 where the exchange takes a large part of the attention's time; beside a ring always 1. The result is the same, bit
            for bit. Not in diffusers.
        exchange: "8 bit" sends half of the bytes of half precision, with an error of about half a per cent (docs/numerics.md): for
            slow links. "exact" sends the original precision. Not in diffusers.
        pipefusion_degree: stages of the model's blocks, each on batch x ring x ulysses ranks. The names of this and the next two
            are xDiT's. Not in diffusers.
        num_pipeline_patch: parts of the tokens that pass through the stages one behind the other; None = as many as stages. More
            than 1 is approximate (docs/numerics.md). Not in diffusers.
        warmup_steps: exact calls of every prompt before approximate ones. Not in diffusers.

    Raises:
        ConfigError: naming field, value, allowed values and remedy.
    """

    ring_degree: int | None = None
    ulysses_degree: int | None = None
    convert_to_fp32: bool = True
    rotate_method: Literal["alltoall", "allgather"] = "allgather"
    mesh: Any = field(default=None, compare=False)
    ulysses_anything: bool = False
    ring_anything: bool = False
    batch_degree: int = 1
    shares: tuple[int, ...] | None = None
    ulysses_rounds: int = 1
    exchange: Literal["exact", "8 bit"] = "exact"
    pipefusion_degree: int = 1
    num_pipeline_patch: int | None = None
    warmup_steps: int = 1

    def __post_init__(self) -> None:
        sizes = (1, 1) if self.mesh is None else axis_sizes(self.mesh)
        for (name, what), size in zip(DEGREES.items(), (*sizes, None, None), strict=True):
            value = getattr(self, name)
            if value is None and size is not None:
                object.__setattr__(self, name, size)
            elif not is_int(value) or value < 1:
                raise bad_value(name, value, "a whole number from 1", f"Set it to the number of {what}.")
        if self.mesh is not None:
            self._check_sizes(sizes)
            if self.batch_degree > 1:
                raise bad_value("batch_degree", self.batch_degree, "1 with a mesh", "Leave the mesh out: all ranks are used then.")
        check_choice("rotate_method", self.rotate_method, ROTATE_METHODS)
        check_choice("exchange", self.exchange, EXCHANGES)
        for name in ("convert_to_fp32", "ulysses_anything", "ring_anything"):
            check_switch(name, getattr(self, name))
        if not is_int(self.ulysses_rounds) or self.ulysses_rounds < 1:
            raise bad_value("ulysses_rounds", self.ulysses_rounds, "a whole number from 1", "Leave it at 1, or try 2.")
        if self.shares is not None:
            object.__setattr__(self, "shares", self._checked_shares(self.shares))
        self._check_stages()

    def _check_stages(self) -> None:
        for name in ("num_pipeline_patch", "warmup_steps"):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value < 1):
                raise bad_value(name, value, "a whole number from 1", "Leave it out, or raise it.")
        if self.pipefusion_degree > 1:
            for name in ("mesh", "shares"):
                if getattr(self, name) is not None:
                    raise bad_value(name, getattr(self, name), "None with pipefusion_degree", "Leave one of them out.")

    def _checked_shares(self, shares: Any) -> Shares:
        ranks = math.prod((*self.mesh_shape, self.batch_degree))
        numbers = tuple(shares) if isinstance(shares, (tuple, list)) else ()
        if len(numbers) != ranks or not all(is_int(share) and 1 <= share <= MAX_SHARE for share in numbers):
            raise bad_value(
                "shares",
                shares,
                f"a whole number from 1 to {MAX_SHARE} for each of the {ranks} ranks that the degrees make, in proportion to "
                f"their speed, such as {(2,) + (1,) * (ranks - 1)}",
                "Give one for each rank, or leave them out.",
            )
        return numbers

    @property
    def mesh_shape(self) -> tuple[int, int]:
        return self.ring_degree or 1, self.ulysses_degree or 1

    @property
    def mesh_dim_names(self) -> tuple[str, str]:
        return "ring", "ulysses"

    def setup(self, rank: int, world_size: int, device: torch.device | str, mesh: Any = None) -> None:
        """Attach the process groups. `apply_context_parallel` does it for the default process group if the caller has not.

        Args:
            rank: this process's rank in the default group.
            world_size: number of ranks there.
            device: device of this rank's tensors.
            mesh: DeviceMesh; None = the config's own, or all ranks.

        Raises:
            ConfigError: the degrees do not fit the ranks or the mesh.
        """
        ring, ulysses = self.mesh_shape
        mesh = mesh if mesh is not None else self.mesh
        if mesh is not None:
            self._check_sizes(axis_sizes(mesh))
        elif (product := ring * ulysses * self.batch_degree * self.pipefusion_degree) != world_size:
            optional = ("batch_degree", "pipefusion_degree")
            shown = {name: getattr(self, name) for name in DEGREES if name not in optional or getattr(self, name) > 1}
            raise bad_value(
                " x ".join(shown),
                f"{' x '.join(map(str, shown.values()))} = {product}",
                f"a product equal to the world size, {world_size}",
                "Change a degree, start as many ranks, or pass a mesh with more axes.",
            )
        if world_size > 1 and not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised. Start the script with torchrun, and call "
                "torch.distributed.init_process_group before setup."
            )
        if not 0 <= rank < world_size:
            raise bad_value("rank", rank, f"0 to {world_size - 1}", "Pass torch.distributed.get_rank().")
        batch = BatchMesh(dist.group.WORLD, shares=self.shares or ())
        object.__setattr__(self, "_batch", batch)
        sequence = batch.sequence() if mesh is None else SequenceMesh.from_device_mesh(mesh, self.shares or ())
        object.__setattr__(self, "_sequence", sequence)

    @property
    def batch(self) -> BatchMesh:
        """All ranks, after `setup`."""
        batch: BatchMesh = self.__dict__["_batch"]
        return batch

    @property
    def compared(self) -> dict[str, Any]:
        """The fields that must be the same on every rank."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.compare}

    @property
    def of_all_ranks(self) -> ContextParallelConfig:
        """The same settings for a call whose sequence all ranks share."""
        if self.batch_degree == 1:
            return self
        return dataclasses.replace(self, ulysses_degree=self.mesh_shape[1] * self.batch_degree, batch_degree=1)

    @property
    def sequence(self) -> SequenceMesh | None:
        """Ranks that share a sequence, after `setup`: all that compute one call. None once their group was destroyed."""
        sequence: SequenceMesh | None = getattr(self, "_sequence", None)
        return sequence if sequence is not None and sequence.is_alive else None

    def _check_sizes(self, sizes: tuple[int, int]) -> None:
        """Raise ConfigError unless the axes of a mesh are as long as the degrees."""
        if sizes != self.mesh_shape:
            raise bad_value(
                "mesh",
                f"ring {sizes[0]} x ulysses {sizes[1]}",
                f"axes of the sizes ring_degree {self.ring_degree} and ulysses_degree {self.ulysses_degree}",
                "Make the mesh and the degrees agree, or leave the degrees out.",
            )

    @classmethod
    def of(cls, config: Any) -> ContextParallelConfig:
        """Convert a config of this package or of diffusers, bare or inside a ParallelConfig. Raises ConfigError for anything else,
        and for another parallelism."""
        if not isinstance(config, _NotOfDiffusers) and getattr(config, "tensor_parallel_config", None) is not None:
            raise bad_value("tensor_parallel_config", "a TensorParallelConfig", "None", "Apply one kind of parallelism here.")
        if hasattr(config, "context_parallel_config"):
            config = config.context_parallel_config or cls()
        if isinstance(config, cls):
            return config
        try:
            theirs = [f.name for f in dataclasses.fields(cls) if f.name not in NOT_OF_DIFFUSERS]
            return cls(**{name: getattr(config, name) for name in theirs})
        except AttributeError as error:
            raise bad_value(
                "parallel_config", config, "a ContextParallelConfig or ParallelConfig", f"Build one of them ({error})."
            ) from None


@dataclass(frozen=True)
class ParallelConfig(_NotOfDiffusers):
    """Argument of `apply_context_parallel`, as in diffusers: a context parallel config by that name; without one it changes
    nothing."""

    context_parallel_config: ContextParallelConfig | None = None

    def setup(self, rank: int, world_size: int, device: torch.device | str, *, mesh: Any = None, cp_mesh: Any = None) -> None:
        """See `ContextParallelConfig.setup`. `cp_mesh` is the name that mindone and diffusers before 0.36 have for `mesh`."""
        if self.context_parallel_config is not None:
            self.context_parallel_config.setup(rank, world_size, device, mesh if mesh is not None else cp_mesh)


@dataclass(frozen=True, kw_only=True)
class SequenceSettings:
    """A user's settings for the sequence axes: as in `ContextParallelConfig`, but both degrees are 0 if chosen for every attention
    (`cost`), and so are rounds. `all_tokens`: attention takes all tokens of a head at once, so the degrees are those of Ulysses, in
    one round."""

    ring_degree: int = 0
    ulysses_degree: int = 0
    convert_to_fp32: bool = True
    rotate_method: Literal["alltoall", "allgather"] = "alltoall"
    ulysses_anything: bool = True
    ring_anything: bool = True
    ulysses_rounds: int = 0
    exchange: Literal["exact", "8 bit"] = "exact"
    all_tokens: bool = False

    def with_degrees(self, ring: int, ulysses: int, rounds: int = 1) -> ContextParallelConfig:
        """Return the same settings with these degrees, and these rounds if none are set."""
        settings = dataclasses.asdict(self)
        rounds = 1 if settings.pop("all_tokens") else self.ulysses_rounds or rounds
        return ContextParallelConfig(**{**settings, "ring_degree": ring, "ulysses_degree": ulysses, "ulysses_rounds": rounds})


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """How calls pass through the stages.

    Args:
        stages: number of stages; the ranks are divided into as many groups of neighbours.
        patches: parts of the tokens that follow each other; more than one is approximate (PipeFusion).
        warmup_calls: exact calls of every conditioning before the approximate ones.
    """

    stages: int
    patches: int = 1
    warmup_calls: int = 1

    def bubble(self, runs: int) -> float:
        """Return the idle fraction of a stage in a call, if all runs and stages take equally long."""
        return (self.stages - 1) / (runs + self.stages - 1)


def axis_sizes(mesh: Any) -> tuple[int, int]:
    """Return the numbers of ranks on the axes ring and ulysses of a DeviceMesh. Raises ConfigError for anything else, or without
    these axes."""
    if not isinstance(mesh, DeviceMesh):
        raise bad_value("mesh", mesh, "a torch.distributed.device_mesh.DeviceMesh", how_to_make_a_mesh())
    names = mesh.mesh_dim_names or ()
    if tuple(name for name in names if name in AXES) != AXES:
        raise bad_value(
            "mesh", f"the axes {', '.join(names) or 'without names'}", "ring and ulysses, in this order", how_to_make_a_mesh()
        )
    ring, ulysses = (mesh.size(names.index(axis)) for axis in AXES)
    return ring, ulysses
