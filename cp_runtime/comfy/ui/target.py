"""A model of the UI process: notes on it, and the check that every rank has the same one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...controller.placement import Demand
from ...engine.weights.blocks import sizes_of
from ...engine.weights.pages import give_back, mapped
from ...errors import MirrorError
from ...families import most_stages
from ...pool.messages import Load, Loaded
from ...pool.protocol import TensorPacker, flatten
from ..shared.files import ModelFiles
from ..shared.modules import layers_of
from ..shared.recipe import FileStamp, Recipe
from ..shared.weights import PREFIX, differing_weight, dtypes_of, model_dtype, network_of, sample_weights, weight_patches_digest

if TYPE_CHECKING:
    from .module_state import ModuleState
    from .recipes import NodeCall

ATTRIBUTE = "context_parallel_notes"
ON_RANKS = "context_parallel_on_ranks"
"""Stands for the id of the weight patches in a model (`current_weight_patches_uuid`): its weights are on the ranks. Any patcher of
ComfyUI that loads the model then takes this for another state of the weights and replaces it."""


@dataclass(frozen=True)
class Target:
    """A diffusion model or a VAE of the UI process, which the workers' mirror must equal. A `ModelState` of the controller.

    Args:
        name: of its file, as ComfyUI's loaders show it.
        files: of the recipe, open.
        call_memory: bytes that ComfyUI expects a call to take on one device.
        encode: makes plain data and tensors of weight patches. Raises MirrorError if one cannot be sent.
    """

    patcher: Any
    recipe: Recipe
    name: str
    files: ModelFiles
    call_memory: float
    encode: Callable[[Any], list[Any]]

    @property
    def key(self) -> str:
        return self.recipe.key

    @property
    def path(self) -> str:
        return self.recipe.path

    @property
    def patches_uuid(self) -> str:
        return str(self.patcher.patches_uuid)

    @property
    def demand(self) -> Demand:
        model, notes = self.patcher.model, notes_of(self.patcher.model)
        if notes.demand is None:
            network = network_of(model)
            notes.demand = Demand(sizes_of(network, partial(model_dtype, model)), 0.0, most_stages(network))
        return notes.demand._replace(call=self.call_memory)

    def request(self, placement: str, device_bytes: int) -> tuple[Load, TensorPacker]:
        packer = TensorPacker()
        tree = flatten(self.encode(self.patcher.patches), packer.add)
        return (
            Load(
                key=self.key, recipe=self.recipe.as_json(), patches=tree, patches_uuid=self.patches_uuid, placement=placement,
                device_bytes=device_bytes,
            ),
            packer,
        )  # fmt: skip

    def verify(self, request: Load, payload: Tensor, loaded: Sequence[Loaded], pids: Sequence[int]) -> None:
        model, file, factory = self.patcher.model, os.path.basename(self.path), self.recipe.factory
        dtype, cast_dtype = dtypes_of(model)
        expected = {
            "digest": weight_patches_digest(request, payload),
            "patches_uuid": self.patches_uuid,
            "dtype": dtype,
            "cast_dtype": cast_dtype,
        }
        if len({reply.formats for reply in loaded}) > 1:
            able = "; ".join(f"rank {rank} in {', '.join(reply.formats) or 'none'}" for rank, reply in enumerate(loaded))
            raise MirrorError(
                f"{file} is multiplied in its quantised format by some of the devices, and cast by others: {able}. Parts of the "
                "result would differ. Leave out the devices that differ (devices of CP Config), or load a file or weight_dtype "
                "that is not quantised."
            )
        samples = notes_of(model).samples = self.comparable_weights()
        for rank, (reply, pid) in enumerate(zip(loaded, pids, strict=True)):
            weight = differing_weight(samples, reply.samples)
            if weight is not None:
                raise MirrorError(
                    f"rank {rank} (pid {pid}) read another weight {weight} from {file} than ComfyUI holds. Either the file was "
                    "replaced after ComfyUI had loaded it, or code in ComfyUI's process changed the weight since. Free ComfyUI's "
                    "model and node cache, or restart it, so that it loads the file again; if that does not help, remove the node "
                    "that changes the weight."
                )
            if factory is not None and reply.layers != layers_of(network_of(model)):
                raise MirrorError(
                    f"{factory.function} made other layers of {file} on rank {rank} (pid {pid}) than in ComfyUI's process. It "
                    "follows settings that a node has changed there. Use Load Diffusion Model or Load Checkpoint."
                )
            for name, value in expected.items():
                if getattr(reply, name) != value:
                    raise MirrorError(
                        f"rank {rank} (pid {pid}) has {name} {getattr(reply, name)} for {file}; the UI process has {value}. All "
                        "ranks must hold the same model: choose a weight_dtype that every device supports."
                    )

    def check_weights(self) -> None:
        """Raise MirrorError if a weight of this process has changed since the ranks' were compared with it."""
        weight = differing_weight(notes_of(self.patcher.model).samples, self.comparable_weights())
        if weight is not None:
            file = os.path.basename(self.path)
            raise MirrorError(
                f"code in ComfyUI's process changed the weight {weight} since the workers loaded {file}. Free ComfyUI's model and "
                "node cache, so that it loads the file again, and remove the node that changes the weight."
            )

    def comparable_weights(self) -> Mapping[str, str]:
        """Return `sample_weights` of the weights that are in this process as they were loaded; of none while weight patches are in.

        It takes about 50 µs per weight. The kernel maps 64 KB of the file around each sample: they are released.
        """
        patcher, network = self.patcher, network_of(self.patcher.model)
        if patcher.model.current_weight_patches_uuid not in (None, ON_RANKS):
            return {}
        patched = {key.removeprefix(PREFIX) for backup in (patcher.backup, patcher.hook_backup) for key in backup}
        samples = sample_weights(network, without=patched)
        with contextlib.suppress(OSError):  # the file is gone
            give_back(network.parameters(), mapped(self.path, unwritten=True))
        return samples


@dataclass
class ModelNotes:
    """Notes on a `BaseModel`.

    Args:
        stamps: of its file, before and after ComfyUI loaded it; None = by no loader that `recipes` watches.
        call: of the node that loaded it, if its loader leaves no recipe.
        recipe: the `cached_patcher_init` that the recipe was read from, and the recipe.
        key: of the recipe, once the controller counts this model as a user of it.
        files: the recipe that the ranks have loaded it by, or will; the name of its file, and its files.
        local: it runs in this process on one device, although the graph has ranks for it.
        shares_file: whether its plain weights are the pages of its file.
        demand: of its weights alone.
        state: of its network's modules, when it was loaded.
        samples: of its weights, when the ranks' were compared with them; of none before.
        run: number of the sampling run in which they were compared again.
    """

    stamps: tuple[FileStamp, FileStamp] | None = None
    call: NodeCall | None = None
    recipe: tuple[Any, Recipe] | None = None
    key: str = ""
    files: tuple[Recipe, str, ModelFiles] | None = None
    local: bool = False
    shares_file: bool = False
    demand: Demand | None = None
    state: ModuleState | None = None
    samples: Mapping[str, str] = field(default_factory=dict)
    run: object = None


def notes_of(model: Any) -> ModelNotes:
    """Return the notes on a `BaseModel`; they are created at first use."""
    notes = vars(model).get(ATTRIBUTE)
    if not isinstance(notes, ModelNotes):
        notes = ModelNotes()
        setattr(model, ATTRIBUTE, notes)
    return notes


def on_ranks(model: Any) -> bool:
    """Return whether the weights of a model are on the ranks, so that it must not compute here."""
    return getattr(model, "current_weight_patches_uuid", None) == ON_RANKS
