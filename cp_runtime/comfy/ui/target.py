"""A model of the UI process, and the check that every rank has the same one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from ...compat import versions
from ...controller.calls import Code
from ...controller.placement import Demand
from ...engine.weights.blocks import sizes_of
from ...engine.weights.pages import give_back, mapped, written
from ...errors import MirrorError, UnsupportedError
from ...families import most_stages
from ...nested import stored
from ...pool.messages import Describe, Described, Load, Loaded
from ...pool.protocol import TensorPacker, flatten
from ..shared.files import ModelFiles
from ..shared.recipe import Recipe
from ..shared.weights import PREFIX, differing_weight, dtypes_of, model_dtype, network_of, sample_weights, weight_patches_digest
from .notes import ON_RANKS, Asking, notes_of


class Fingerprint(Protocol):
    """What a model computes with, to compare with the ranks: see `fingerprints.ModelFingerprint`."""

    @property
    def roots(self) -> tuple[str, ...]:
        """Names of code that computes with it besides its own."""

    @property
    def loader(self) -> Code | None:
        """Code of a node pack by which ranks load it."""

    @property
    def packs(self) -> tuple[str, ...]:
        """Paths of node packs with code that it computes with, in the order of their import."""

    def compare(self, replies: Sequence[Loaded], same_computer: bool, ask: Asking) -> None:
        """Compare it with those of the ranks. Raises UnsupportedError where they differ. `same_computer`: they are all on this
        one."""


@dataclass(frozen=True)
class Target:
    """A diffusion model or a VAE of the UI process, which the workers' mirror must equal. A `ModelState` of the controller.

    Args:
        name: of its file, as ComfyUI's loaders show it.
        files: of the recipe, open.
        call_memory: bytes that ComfyUI expects a call to take on one device.
        encode: makes plain data and tensors of weight patches. Raises MirrorError if one cannot be sent.
        fingerprint: of its code and its modules.
        describe: says what its file is, for other computers: see `recipe.describe`.
    """

    patcher: Any
    recipe: Recipe
    name: str
    files: ModelFiles
    call_memory: float
    encode: Callable[[Any], list[Any]]
    fingerprint: Fingerprint
    describe: Callable[[], dict[str, Any]] = dict

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

    @property
    def loader_code(self) -> Code | None:
        return self.fingerprint.loader

    def request(self, placement: str, device_bytes: int) -> tuple[Load, TensorPacker]:
        packer = TensorPacker()
        tree = flatten(self.encode(self.patcher.patches), packer.add)
        return (
            Load(
                key=self.key, recipe=self.recipe.as_json(), patches=tree, patches_uuid=self.patches_uuid, placement=placement,
                device_bytes=device_bytes, roots=self.fingerprint.roots, packs=self.fingerprint.packs,
            ),
            packer,
        )  # fmt: skip

    def verify(
        self,
        request: Load,
        payload: Tensor,
        loaded: Sequence[Loaded],
        pids: Sequence[int],
        ask: Callable[[Describe], Sequence[Described]],
    ) -> None:
        model, file = self.patcher.model, os.path.basename(self.path)
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

        def describe(packs: Collection[str]) -> Sequence[Described]:
            return ask(Describe(key=self.key, roots=request.roots, packs=tuple(packs)))

        self.fingerprint.compare(loaded, not request.travelled, describe)
        samples = notes_of(model).samples = self.comparable_weights()
        changed = self._written(samples)
        for rank, (reply, pid) in enumerate(zip(loaded, pids, strict=True)):
            weight = changed or differing_weight(samples, reply.samples)
            if weight is not None:
                raise MirrorError(
                    f"rank {rank} (pid {pid}) read another weight {weight} from {file} than ComfyUI holds. Either the file was "
                    "replaced after ComfyUI had loaded it, or code in ComfyUI's process changed the weight since. Free ComfyUI's "
                    "model and node cache, or restart it, so that it loads the file again; if that does not help, remove the node "
                    "that changes the weight."
                )
            for name, value in expected.items():
                if getattr(reply, name) != value:
                    raise MirrorError(
                        f"rank {rank} (pid {pid}) has {name} {getattr(reply, name)} for {file}; the UI process has {value}. All "
                        "ranks must hold the same model: choose a weight_dtype that every device supports."
                    )

    def check_weights(self) -> None:
        """Raise MirrorError if a weight of this process has changed since the ranks' were compared with it."""
        samples, now = notes_of(self.patcher.model).samples, self.comparable_weights()
        weight = self._written(now) or differing_weight(samples, now)
        if weight is not None:
            file = os.path.basename(self.path)
            raise MirrorError(
                f"code in ComfyUI's process changed the weight {weight} since the workers loaded {file}. Free ComfyUI's model and "
                "node cache, so that it loads the file again, and remove the node that changes the weight."
            )

    def note_weights(self) -> None:
        """Note where the weights are, at the start of a run: see `check_call`."""
        notes_of(self.patcher.model).places = self._places()

    def check_call(self) -> None:
        """Raise UnsupportedError if code in this process has changed a weight since the run began: put another tensor in its place,
        or written to it, except by way of `data` in memory that is no page of its file."""
        before, now = notes_of(self.patcher.model).places, self._places()
        patched = {name.removeprefix(PREFIX) for name in self.patcher.backup}  # by ComfyUI
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name) and name not in patched]
        weight = next(iter(changed), None) or self._written(now.keys() - patched)
        if weight is not None:
            raise UnsupportedError(
                f"a node changed the weight {weight} while sampling, and the workers have it as it was loaded. Remove that node, "
                "or set on_unsupported of CP Config to 'single device'."
            )

    def _places(self) -> dict[str, tuple[int, ...]]:
        parameters = network_of(self.patcher.model).named_parameters()
        return {name: (*(part.data_ptr() for part in stored(weight)), *(versions([weight]) or ())) for name, weight in parameters}

    def _written(self, samples: Collection[str]) -> str | None:
        """Return a weight, of those with samples, in a page of the file that this process has written something else to."""
        weights = {name: weight for name, weight in network_of(self.patcher.model).named_parameters() if name in samples}
        with contextlib.suppress(OSError):  # the file is gone, or no system tells
            return written(self.path, weights)
        return None

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
