"""A model as the UI process has it, and the check that every rank has the same one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...controller.calls import ModelState
from ...controller.placement import Demand
from ...engine.weights.blocks import sizes_of
from ...engine.weights.pages import give_back, mapped
from ...errors import MirrorError
from ...pool.messages import Load, Loaded
from ...pool.protocol import TensorPacker, flatten
from ..patches.wire_digest import weight_patches_digest
from .ui_notes import notes_of
from .wire_dtypes import model_dtype
from .wire_modules import layers_of
from .wire_recipe import Recipe
from .wire_samples import differing_weight, sample_weights


@dataclass(frozen=True, kw_only=True)
class Target(ModelState):
    """A model as the UI process has it: what the workers' mirror must equal.

    Args:
        patches: returns those of weights, as plain data and tensors. Raises MirrorError: one cannot be sent.
        samples: returns `comparable_weights`. It takes about 50 µs per weight, so it is called only when the workers have loaded
            the model, and not for every call.
        layers: returns `layers_of`: a loader of a node pack may make other ones in a process where other settings hold.
    """

    recipe: Recipe
    patches: Callable[[], list[Any]] = field(repr=False)
    dtype: str
    cast_dtype: str
    samples: Callable[[], Mapping[str, str]] = field(repr=False)
    layers: Callable[[], str] = field(repr=False)

    @classmethod
    def of(cls, patcher: Any, recipe: Recipe, call_memory: float, patches: Callable[[], list[Any]]) -> Target:
        """Describe a ModelPatcher.

        Args:
            call_memory: bytes that ComfyUI expects a call to take on one device.
            patches: returns its weight patches as plain data and tensors.
        """
        return cls(
            recipe=recipe,
            key=recipe.key,
            path=recipe.path,
            patches=patches,
            patches_uuid=str(patcher.patches_uuid),
            dtype=str(patcher.model.get_dtype()),
            cast_dtype=str(patcher.model.manual_cast_dtype),
            samples=partial(comparable_weights, patcher, recipe.path),
            layers=partial(layers_of, patcher.model.diffusion_model),
            demand=demand_of(patcher.model, patcher.model.diffusion_model, call_memory),
        )

    def request(self, placement: str, device_bytes: int) -> tuple[Load, TensorPacker]:
        """See `ModelState`."""
        packer = TensorPacker()
        tree = flatten(self.patches(), packer.add)
        return (
            Load(
                key=self.key, recipe=self.recipe.as_json(), patches=tree, patches_uuid=self.patches_uuid, placement=placement,
                device_bytes=device_bytes,
            ),
            packer,
        )  # fmt: skip

    def verify(self, request: Load, payload: Tensor, loaded: Sequence[Loaded], pids: Sequence[int]) -> None:
        """See `ModelState`."""
        verify(self, weight_patches_digest(request.patches, payload), loaded, pids)


def demand_of(model: Any, network: nn.Module, call_memory: float) -> Demand:
    """Return the memory that a `BaseModel` or a VAE takes. Its weights are counted once.

    Args:
        network: of the model, with the weights that ranks hold.
        call_memory: bytes that ComfyUI expects a call to take on one device.
    """
    notes = notes_of(model)
    if notes.sizes is None:
        notes.sizes = sizes_of(network, partial(model_dtype, model))
    return Demand(notes.sizes, call_memory)


def comparable_weights(patcher: Any, path: str) -> Mapping[str, str]:
    """Return `sample_weights` of the weights that are in this process as they were loaded; of none while weight patches are in.

    The kernel maps 64 KB of the file around each sample: they are given back.

    Args:
        path: of the model's file.
    """
    if patcher.model.current_weight_patches_uuid is not None:
        return {}
    prefix = "diffusion_model."
    patched = {key.removeprefix(prefix) for backup in (patcher.backup, patcher.hook_backup) for key in backup}
    samples = sample_weights(patcher.model.diffusion_model, without=patched)
    with contextlib.suppress(OSError):  # the file is gone
        give_back(patcher.model.diffusion_model.parameters(), mapped(path, unwritten=True))
    return samples


def verify(target: Target, digest: str, replies: Sequence[Loaded], pids: Sequence[int]) -> None:
    """Compare what every rank reports about its mirror with the UI process's model.

    Raises:
        MirrorError: naming the rank, what differs and both values.
    """
    expected = {
        "digest": digest,
        "patches_uuid": target.patches_uuid,
        "dtype": target.dtype,
        "cast_dtype": target.cast_dtype,
    }
    if len({reply.formats for reply in replies}) > 1:
        able = "; ".join(f"rank {rank} in {', '.join(reply.formats) or 'none'}" for rank, reply in enumerate(replies))
        raise MirrorError(
            f"{os.path.basename(target.recipe.path)} is multiplied in its quantised format by some of the devices, and cast by "
            f"others: {able}. Parts of the result would differ. Leave out the devices that differ (devices of CP Config), or load "
            "a file or weight_dtype that is not quantised."
        )
    samples = target.samples()
    file = os.path.basename(target.recipe.path)
    for rank, reply in enumerate(replies):
        weight = differing_weight(samples, reply.samples)
        if weight is not None:
            raise MirrorError(
                f"rank {rank} (pid {pids[rank]}) read another weight {weight} from {file} than ComfyUI holds. Either the file was "
                "replaced after ComfyUI had loaded it, or code in ComfyUI's process changed the weight since. Free ComfyUI's model "
                "and node cache, or restart it, so that it loads the file again; if that does not help, remove the node that "
                "changes the weight."
            )
        if target.recipe.factory is not None and reply.layers != target.layers():
            raise MirrorError(
                f"{target.recipe.factory.function} made other layers of {file} on rank {rank} (pid {pids[rank]}) than in ComfyUI's "
                "process. It follows settings that a node has changed there. Use Load Diffusion Model or Load Checkpoint."
            )
        for name, value in expected.items():
            if getattr(reply, name) != value:
                raise MirrorError(
                    f"rank {rank} (pid {pids[rank]}) has {name} {getattr(reply, name)} for {file}; the UI "
                    f"process has {value}. All ranks must hold the same model: choose a weight_dtype that every device supports."
                )
