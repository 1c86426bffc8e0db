"""A model of this process as the ranks get it: its network by value, and its weights in memory that they map.

A weight in the pages of a file stays there. Others move into one segment of shared memory per model, when ranks first get it: the
model's own weights become views of that, one after the other, so there is one copy of them, whatever loader has made the model.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import comfy.ops
import torch
from comfy.model_patcher import ModelPatcher, ModelPatcherDynamic
from comfy.utils import get_attr
from torch import Tensor, nn

from ...compat import as_parameter, parameter_slots, state_dict_loader, versions
from ...engine.weights.packing import round_up
from ...errors import MirrorError
from ...families import splits_tokens
from ...nested import is_plain_storage_subclass
from ...pool.blocks import SharedBlock
from ...system import system
from ..shared.fingerprint import PLAIN
from ..shared.modules import LOADER_SETTINGS
from ..shared.objects import Settings, Written, write
from ..shared.values import Facts, Place, Value, extent
from ..shared.weights import AS_IN_FILE, PREFIX, is_dynamic, is_small, model_dtype, network_of, sample
from .noted import originals_of
from .packs import PACKAGE

LARGE = 1 << 20  # bytes
_VALUES: WeakKeyDictionary[Any, ModelValue] = WeakKeyDictionary()
_SERIAL = itertools.count(1)


def alignment(nbytes: int) -> int:
    """Return where weights begin: large ones at a page, as CUDA registers pages; others as CPU libraries want it."""
    return mmap.PAGESIZE if nbytes >= LARGE else 64


class Segment:
    """Shared memory that is filled piece by piece, so that each source can be freed after its copy."""

    def __init__(self, nbytes: int) -> None:
        self.block, self._end = SharedBlock(), 0
        os.ftruncate(self.block.fd, max(nbytes, mmap.PAGESIZE))
        self.pages = torch.frombuffer(mmap.mmap(self.block.fd, max(nbytes, mmap.PAGESIZE)), dtype=torch.uint8)
        weakref.finalize(self, self.block.close).atexit = False

    def take(self, numbers: Tensor) -> int:
        """Copy bytes in; return where they are. Raises MirrorError: there is no room."""
        start = round_up(self._end, alignment(numbers.numel()))
        self._end = start + numbers.numel()
        try:
            system.write_at(self.block.fd, numbers.numpy().data, start)  # allocates, and says so where it cannot: a view would not
        except OSError as error:
            raise MirrorError(
                f"no room for {self._end / 2**30:.1f} GB of the model in memory shared with the workers: {error.strerror}. Free "
                "memory, or raise the limit of the container or session."
            ) from error
        return start


class Files:
    """Files that this process has mapped now, by address."""

    def __init__(self) -> None:
        self._spans = system.mapped_files()
        self._starts = [start for start, _, _ in self._spans]
        self._ranges: dict[str, list[tuple[int, int, int]]] = {}

    def place(self, begin: int, end: int) -> tuple[str, int] | None:
        """Return (path, place in the file) of these addresses, unless this process has written to them."""
        index = bisect_right(self._starts, begin) - 1
        if index < 0 or begin >= self._spans[index][1]:
            return None
        path = self._spans[index][2]
        if path not in self._ranges:
            try:
                self._ranges[path] = system.file_ranges(path)
            except (OSError, ValueError):  # it has no name any more, or no content
                self._ranges[path] = []
        found = next((each for each in self._ranges[path] if each[0] <= begin and end <= each[1]), None)
        return None if found is None or system.is_written(begin, end) else (path, found[2] + begin - found[0])


class Found(NamedTuple):
    """A tensor that travels.

    Args:
        name: of the weight in the network; other tensors have a number.
        numbers: its memory, without gaps, in bytes.
        dtype: of what ranks get.
        owner: whose memory it is.
        is_weight: it is one of the network's.
    """

    name: str
    numbers: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    owner: Tensor
    is_weight: bool

    @property
    def moves(self) -> bool:
        """Whether it may move into the segment."""
        return self.is_weight and self.dtype == self.owner.dtype

    @property
    def nbytes(self) -> int:
        return self.numbers.numel() // self.owner.element_size() * self.dtype.itemsize

    @property
    def region(self) -> tuple[str, torch.dtype, int]:
        return self.name, self.dtype, self.nbytes

    def converted(self) -> Tensor:
        """Return the bytes in the dtype of the ranks, in host memory."""
        if self.dtype == self.owner.dtype:
            return self.numbers.cpu()
        return self.numbers.view(self.owner.dtype).to("cpu", self.dtype).view(torch.uint8)


class ModelValue:
    """The value of one `BaseModel` or VAE over its lifetime."""

    def __init__(self) -> None:
        self._blocks: list[SharedBlock] = []
        self._segments: dict[int, Segment] = {}  # by the number of its block
        self._files: dict[str, int] = {}
        self._regions: dict[tuple[str, torch.dtype, int], list[tuple[int, int]]] = {}  # name, dtype, bytes -> segment, offset
        self._identity: tuple[Any, ...] = ()  # see there
        self._value: Value | None = None
        self._samples: tuple[str, ...] = ()

    @property
    def files(self) -> dict[str, int]:
        """The files with some of its weights, by path, and the numbers of their blocks."""
        return dict(self._files)

    def of(self, patcher: Any, thorough: bool = True) -> Value:
        """Return the value of a patcher's model, anew where anything has changed. Raises MirrorError: it has something that cannot
        be sent.

        Args:
            thorough: also where weights were written to by way of `data`, in the samples of each.
        """
        known, before, sampled = self._value, self._identity, self._samples
        identity, samples = self._look(patcher, thorough)
        if known is not None and identity == before and samples in (None, sampled):
            return known
        written = self._write(patcher)
        places = self._place(patcher, written)
        self._identity, now = self._look(patcher)  # weights may have moved
        self._samples = now or ()
        rewritten = identity == before or (known is not None and _written_in_place(before, identity))
        if rewritten or sampled != self._samples or _forms(before) != _forms(self._identity):
            key = f"model {next(_SERIAL)}"
            self._value = Value(key, written.data, places, tuple(self._blocks), written.names, written.classes)
        return cast(Value, self._value)

    def _look(self, patcher: Any, thorough: bool = True) -> tuple[tuple[Any, ...], tuple[str, ...] | None]:
        """Return `_identity` of a model without its caches, and samples of its tensors; without these unless `thorough`. Holds none
        of the tensors: what moves is to be freed."""
        written = self._write(patcher, later=False)
        return _identity(written), samples_of(written) if thorough else None

    def _write(self, patcher: Any, later: bool = True) -> Written:
        model = patcher.model
        network = network_of(model)
        given = self._marks(model), self._instead(patcher), _originals(patcher)
        settings = Settings(later, *given, methods=not splits_tokens(network))
        return write((network, loading_class(type(patcher)), _own_settings(patcher), tuple(Facts.of(model))), settings)

    def _marks(self, model: Any) -> Callable[[nn.Module], dict[str, Any]]:
        dynamic = is_dynamic(model)

        def marks(module: nn.Module) -> dict[str, Any]:
            given = {name: getattr(module, name) for name in LOADER_SETTINGS if hasattr(type(module), name)}
            return {**given, **AS_IN_FILE} if dynamic and _stays_as_in_file(module) else given

        return marks

    def _instead(self, patcher: Any) -> dict[int, Tensor]:
        """Return the weights that ComfyUI has patched in this process as they were, by the id of those in their place."""
        found: dict[int, Tensor] = {}
        for name, backup in patcher.backup.items():
            now = get_attr(patcher.model, name)
            found[id(now)] = as_parameter(backup.weight, now.requires_grad)
        return found

    def _place(self, patcher: Any, written: Written) -> tuple[Place, ...]:
        """Return the places of tensors in memory that ranks map; move them there where they are not."""
        names, dtypes = self._weights(patcher)
        found = {
            number: Found(
                names.get(id(owner), f"#{number}"),
                _without_gaps(tensor),
                tuple(tensor.shape),
                tensor.stride(),
                dtypes.get(id(owner), tensor.dtype),
                owner,
                id(owner) in names,
            )
            for number, (tensor, owner) in enumerate(zip(written.tensors, written.owners, strict=True))
        }
        written.tensors.clear()  # each is freed when it has moved
        files = Files()
        known = {number: self._known(each, files) or self._before(each) for number, each in found.items()}
        new = [found[number].nbytes for number, place in known.items() if place is None]
        if new:
            segment = self._segments[len(self._blocks)] = Segment(sum(nbytes + alignment(nbytes) for nbytes in new))
            self._blocks.append(segment.block)
        places = []
        for number, place in known.items():
            each = found.pop(number)
            if place is None:
                place = len(self._blocks) - 1, segment.take(each.converted())
                self._regions.setdefault(each.region, []).append(place)
            if place[0] in self._segments:
                self._move(each, self._pages(place, each.nbytes))
            dtype = str(each.dtype).removeprefix("torch.")
            places.append(Place(*place, dtype, each.shape, each.stride, each.numbers.device.type))
        return tuple(places)

    def _before(self, each: Found) -> tuple[int, int] | None:
        """Return where a tensor was before, if it is as it was: ComfyUI has had it on a device meanwhile. Others may still use that
        place, so nothing is written there."""
        known = self._regions.get(each.region, ())
        return next((place for place in known if torch.equal(self._pages(place, each.nbytes), each.converted())), None)

    def _known(self, each: Found, files: Files) -> tuple[int, int] | None:
        """Return the place of a tensor that is in memory which ranks map already, or in a file."""
        if each.numbers.device.type != "cpu" or each.dtype != each.owner.dtype or not each.nbytes:
            return None
        begin = each.numbers.data_ptr()
        for index, segment in self._segments.items():
            if 0 <= begin - segment.pages.data_ptr() <= segment.pages.numel() - each.nbytes:
                return index, begin - segment.pages.data_ptr()
        if not each.moves or (place := files.place(begin, begin + each.nbytes)) is None:
            return None
        path, offset = place
        index = self._files.get(path, -1)
        if index < 0 or not os.path.samestat(os.fstat(self._blocks[index].fd), os.stat(path)):
            index = self._files[path] = len(self._blocks)
            block = SharedBlock(os.open(path, os.O_RDONLY), is_file=True)
            weakref.finalize(self, block.close).atexit = False
            self._blocks.append(block)
        return index, offset

    def _pages(self, region: tuple[int, int], nbytes: int) -> Tensor:
        index, offset = region
        return self._segments[index].pages[offset : offset + nbytes]

    @staticmethod
    def _move(each: Found, block: Tensor) -> None:
        """Have a weight be a view of the segment: its own memory is free then."""
        if each.moves and each.numbers.device.type == "cpu" and each.nbytes and not is_plain_storage_subclass(each.owner):
            owner = each.owner
            owner.data = block.view(owner.dtype).as_strided(owner.shape, owner.stride())

    @staticmethod
    def _weights(patcher: Any) -> tuple[dict[int, str], dict[int, torch.dtype]]:
        """Return names of plain memory of weights, by id, and the dtype of those that ranks get in another one."""
        model = patcher.model
        names: dict[int, str] = {}
        dtypes: dict[int, torch.dtype] = {}
        for path, module in network_of(model).named_modules():
            slots = parameter_slots(module)
            converts = is_dynamic(model) and not _stays_as_in_file(module)
            for name, weight in slots.items():
                if weight is None:
                    continue
                for part in _memory(weight):
                    names.setdefault(id(part), f"{path}.{name}")
                if converts and (dtype := model_dtype(model, module, name)) != weight.dtype:
                    dtypes[id(weight)] = dtype
        return names, dtypes


def value_of(model: Any) -> ModelValue:
    """Return the value of a `BaseModel` or VAE; it is made at first use."""
    return _VALUES.setdefault(model, ModelValue())


def _stays_as_in_file(module: nn.Module) -> bool:
    """Return whether DynamicVRAM keeps the weights of a module in the dtype of the file, and its class takes them from there as
    they are; those of node packs have ways of their own."""
    ops = comfy.ops.disable_weight_init
    plain = {state_dict_loader(cls) for cls in (nn.Module, ops.Linear, ops.Embedding)}
    return state_dict_loader(type(module)) in plain and is_small(module, parameter_slots(module).values())


def _originals(patcher: Any) -> dict[int, dict[str, Any]]:
    """Return the attributes of the network that were replaced, or noted by patches: the ranks do so by themselves."""
    found: dict[int, dict[str, Any]] = {}
    for name, before in patcher.object_patches_backup.items():
        if name.startswith(PREFIX):
            path, _, attribute = name.rpartition(".")
            found.setdefault(id(get_attr(patcher.model, path)), {})[attribute] = before
    for module, attributes in originals_of(network_of(patcher.model)).items():
        found.setdefault(module, {}).update(attributes)
    return found


def _memory(weight: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose memory a weight is, themselves."""
    flatten = getattr(weight, "__tensor_flatten__", None)
    if flatten is None:
        yield weight
    else:
        for name in flatten()[0]:
            yield from _memory(getattr(weight, name))


def _without_gaps(tensor: Tensor) -> Tensor:
    """Return the memory between the first and the last number of a tensor, as bytes."""
    return tensor.as_strided((extent(tensor.shape, tensor.stride()),), (1,)).view(torch.uint8)


def _identity(written: Written) -> tuple[Any, ...]:
    """Return a key that changes with the tensors, and with every write to them except by way of `data`."""
    each = zip(written.tensors, written.owners, strict=True)
    return written.data, tuple((t.data_ptr(), versions([owner]), t.dtype, t.shape, t.stride(), t.device.type) for t, owner in each)


def _forms(identity: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the part of `_identity` that does not depend on addresses."""
    return (identity[0], *(each[2:] for each in identity[1])) if identity else ()


def _written_in_place(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    known = {at: version for at, version, *_ in before[1]}
    return any(known.get(at, version) != version for at, version, *_ in now[1])


def samples_of(written: Written) -> tuple[str, ...]:
    """Return samples of the tensors of a thing, see `sample`."""
    return tuple(sample(_without_gaps(tensor)) for tensor in written.tensors)


@functools.cache
def _usual() -> frozenset[str]:
    """Return the attribute names of ComfyUI's patchers."""
    return frozenset(vars(ModelPatcher(nn.Module(), torch.device("cpu"), torch.device("cpu"))))


def _own_settings(patcher: Any) -> dict[str, Any]:
    """Return the additional attributes of a node pack's patcher, by name."""
    if loading_class(type(patcher)) is ModelPatcher:
        return {}
    own = {name: value for name, value in vars(patcher).items() if name not in _usual() and type(value) in PLAIN}
    return {name: value for name, value in own.items() if not name.startswith(("cp_", "_"))}


def loading_class(cls: type[Any]) -> type[Any]:
    """Return the class of patchers by which ranks hold a model: ComfyUI's, without DynamicVRAM, or a node pack's."""
    kinds = (each for each in cls.__mro__ if not each.__module__.startswith(PACKAGE))
    return next(each for each in kinds if each is not ModelPatcherDynamic)
