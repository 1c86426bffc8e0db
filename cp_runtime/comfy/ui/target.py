"""A model of the UI process, and the check that every rank has the same one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...controller.placement import Demand
from ...engine.weights.blocks import Sizes, sizes_of
from ...errors import MirrorError
from ...families import most_stages
from ...pool.blocks import SharedBlock
from ...pool.messages import Block, Copy, Describe, Described, Load, Loaded, Region
from ...pool.protocol import TensorPacker
from ...pool.settings import label_of
from ..shared.values import Value, packed
from ..shared.weights import model_dtype, network_of, weight_patches_digest
from .notes import Asking, notes_of
from .weight_patches import written_patches


class Fingerprint(Protocol):
    """The code that a model computes with, to compare with the ranks: see `fingerprints.ModelFingerprint`."""

    @property
    def roots(self) -> tuple[str, ...]:
        """Names of code that computes with it besides its own."""

    @property
    def packs(self) -> tuple[str, ...]:
        """Paths of node packs with code that it computes with, in the order of their import."""

    def compare(self, replies: Sequence[Loaded], ask: Asking) -> None:
        """Compare it with those of the ranks. Raises UnsupportedError where they differ."""


@dataclass(frozen=True)
class Target:
    """A diffusion model or a VAE of the UI process, which the workers get. A `ModelState` of the controller.

    Args:
        value: what they get.
        name: of its file, as ComfyUI's loaders show it.
        kind: what models have in common that were loaded alike.
        call_memory: bytes that ComfyUI expects a call to take on one device.
        fingerprint: of its code.
        copies: see `ModelState`.
        beside: sizes of ControlNets that ranks run with it.
    """

    patcher: Any
    value: Value
    name: str
    kind: str
    call_memory: float
    fingerprint: Fingerprint
    copies: Callable[[], tuple[Copy, ...]] = tuple
    beside: tuple[Sizes, ...] = ()

    @property
    def key(self) -> str:
        return self.value.key

    @property
    def blocks(self) -> tuple[SharedBlock, ...]:
        return self.value.blocks

    @property
    def regions(self) -> Sequence[Region]:
        return self.value.regions

    @property
    def patches_uuid(self) -> str:
        return str(self.patcher.patches_uuid)

    @property
    def demand(self) -> Demand:
        model, notes = self.patcher.model, notes_of(self.patcher.model)
        if notes.demand is None:
            network = network_of(model)
            notes.demand = Demand(sizes_of(network, partial(model_dtype, model)), 0.0, most_stages(network))
        return notes.demand._replace(call=self.call_memory, beside=self.beside)

    def request(self, placement: str, device_bytes: int) -> tuple[Load, TensorPacker]:
        packer = TensorPacker()
        network = torch.frombuffer(bytearray(packed(self.value.data, self.value.places)), dtype=torch.uint8)
        tree = packer.add(network, "network")
        patches = tuple(packer.add(each, "patches") for each in written_patches(self.patcher.patches).leaves)
        blocks = tuple(Block(address=each.address, nbytes=each.size, is_file=each.is_file) for each in self.blocks)
        return (
            Load(
                key=self.key, name=self.name, network=tree, blocks=blocks,
                patches=patches, patches_uuid=self.patches_uuid, placement=placement, device_bytes=device_bytes,
                roots=self.fingerprint.roots, packs=self.fingerprint.packs,
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
        digest = weight_patches_digest(request, payload)
        for rank, (reply, pid) in enumerate(zip(loaded, pids, strict=True)):
            if reply.digest != digest:
                raise MirrorError(f"rank {rank} (pid {pid}) got other weight patches of {self.name} than ComfyUI has.")
        if len({reply.formats for reply in loaded}) > 1:
            able = "; ".join(f"rank {rank} in {', '.join(reply.formats) or 'none'}" for rank, reply in enumerate(loaded))
            raise MirrorError(
                f"{self.name} is multiplied in its quantised format by some of the devices, and cast by others: {able}. Parts of "
                f"the result would differ. Leave out the devices that differ ({label_of('devices')}), or load a file or "
                "weight_dtype that is not quantised."
            )

        def describe(packs: Collection[str]) -> Sequence[Described]:
            return ask(Describe(key=self.key, roots=request.roots, packs=tuple(packs)))

        self.fingerprint.compare(loaded, describe)
