"""Code of other nodes that no table lists, on all tokens: what it gets is gathered, it runs on every rank, its result is split.

That is exact for code that takes all tokens in one process, and as slow as there. All ranks together find out which dimension of a
tensor counts which tokens, by lengths, in the first call: a length that is a rank's number of tokens by chance is hardly that on
all ranks. ComfyUI's process compares the first call with one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from ...engine.call import RunningCall
from ...engine.plan import ModulePlan
from ...engine.ranks.collectives import RankGroup
from ...engine.state import Copied
from ...errors import PatchError
from ...nested import tensors
from ...pool.worker import CallCancelledOnRank

OVERRIDE = "optimized_attention_override"  # all options of the model have it, and their copies
NOTHING: Mapping[int, Tensor] = MappingProxyType({})
BITS = 62
PATCHES = "patches", "patches_replace"
IMG_SLICE = "img_slice"  # [tokens before the image, all tokens]

Streams = tuple[str, ...]
Place = tuple[Streams, int] | None
"""Streams and dimension of a tensor's tokens; None = it has none."""


class WholeTokens:
    """A patch, or a replaced forward, that gets all tokens.

    Args:
        function: the code.
        call: the running call.
        name: of the code, the same on all ranks.
        known: where tokens are, by the names of tensors and what else all ranks have alike; as long as the patch is the same.
        is_model: it is the forward of the model, whose result is whole on every rank.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        call: RunningCall,
        name: str,
        known: dict[object, list[Place]],
        is_model: bool = False,
    ) -> None:
        self.function, self._call, self._name, self._known, self._is_model = function, call, name, known, is_model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it. Raises PatchError: it has raised something."""
        split = _Split(self._call)
        whole_args, whole_kwargs = split.gather((args, kwargs), (self._name, ""), self._known)
        blocks = _Blocks(self._call, split, self._name, self._known)
        try:
            with self._call.tokens(on_all=True, blocks=blocks):
                out = self.function(*whole_args, **whole_kwargs)
        except (PatchError, CallCancelledOnRank, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise PatchError(f"{self._name} raised {type(error).__name__}: {error}") from error
        finally:
            split.restore_counts()
        blocks.agree("")
        split.write_back()
        return out if self._is_model else split.local(out)


class _Blocks:
    """Runs blocks on this rank's tokens inside code that has all of them: see `engine.call.Blocks`."""

    def __init__(self, call: RunningCall, split: _Split, name: str, known: dict[object, list[Place]]) -> None:
        self._call, self._split, self._name, self._known = call, split, name, known
        self._inside = ExitStack()
        self._copies: list[Copied] = []

    def enter(self, name: str, values: Any) -> None:
        self._check(values)
        self.agree(name)
        self._inside.enter_context(self._call.tokens(on_all=False))
        self._inside.enter_context(self._split.own_counts())
        self._copies = self._inside.enter_context(self._split.copies())
        self._call.entered[name] = self

    def split(self, values: Any, plan: ModulePlan) -> Any:
        return self._split.take(values, plan.attention or ())

    def leave(self, name: str, out: Any) -> Any:
        # Blocks may change their inputs in place, which whoever has called them sees.
        changed = {id(each.local): self._split.put_back(each) for each in self._copies if each.local._version != each.version}
        whole = self._split.gather(out, (self._name, name), self._known, changed)
        self._inside.close()
        return whole

    @cached_property
    def _of_the_call(self) -> set[int]:
        """The patches of the call's own options, by id."""
        return set(map(id, _patches_in(self._call.state.arguments)))

    def _check(self, values: Any) -> None:
        """Raise PatchError where the code gives a block patches of its own: they would get this rank's tokens."""
        if any(id(each) not in self._of_the_call for each in _patches_in(values)):
            raise PatchError(f"{self._name} gives a block patches of its own")

    def agree(self, name: str) -> None:
        """Raise PatchError on all ranks unless all are about to run the block of this name ("": no further one): one alone would
        wait for the others' tokens.

        They decide on the same numbers; but code may look at its rank, or at a clock.
        """
        if not agree(self._call.mesh.whole, name):
            raise PatchError(f"{self._name} does not run the same blocks on all workers")


def agree(ranks: RankGroup, text: str) -> bool:
    """Return whether all ranks have the same text. A collective."""
    if ranks.size == 1:
        return True
    number = crc32(text.encode())
    most, least = ranks.largest(torch.tensor([number, -number], device=ranks.device)).tolist()
    return bool(most == -least)


def _patches_in(value: Any, inside: bool = False) -> Iterator[Any]:
    """Yield the patches and the attention of all options in arguments."""
    if isinstance(value, dict):
        for key, item in value.items():
            own = OVERRIDE in value and key in (OVERRIDE, *PATCHES)
            if inside or own or OVERRIDE not in value:
                yield from _patches_in(item, inside or own)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _patches_in(item, inside)
    elif inside and value is not None:
        yield value


def plain(thing: Any) -> Any:
    """Return the code itself."""
    thing = thing.forward if isinstance(thing, InPlace) else thing
    return thing.function if isinstance(thing, WholeTokens) else thing


class InPlace(NamedTuple):
    """A module in the place of one of the model's, and its forward, which gets all tokens."""

    module: nn.Module
    forward: Callable[..., Any]


class _Split:
    """How the tokens of the values of one run are split."""

    def __init__(self, call: RunningCall) -> None:
        self._call, self._state = call, call.state
        self._named: dict[str, Place] = {}
        self._shapes: dict[torch.Size, Place] = {}
        self._made: list[Copied] = []
        self._counts: list[tuple[dict[str, Any], Any]] = []

    @contextmanager
    def copies(self) -> Iterator[list[Copied]]:
        """Collect the local copies that modules get of whole tensors, while active."""
        before, self._state.copies = self._state.copies, []
        try:
            yield self._state.copies
        finally:
            self._state.copies = before

    def put_back(self, copied: Copied) -> Tensor:
        """Write the ranks' changes of their parts into the tensor with all tokens; return it."""
        return copied.whole.copy_(self._call.gather_joint(copied.local, copied.streams, copied.dim))

    def restore_counts(self) -> None:
        for options, own in self._counts:
            options[IMG_SLICE] = own

    def write_back(self) -> None:
        """Write changes in place of tensors with all tokens into this rank's."""
        for each in self._made:
            if each.whole._version != each.version:
                layout = self._state.layout(each.streams)
                each.local.copy_(layout.take_local(each.whole, self._state.rank, each.dim))

    def gather(
        self,
        values: Any,
        where: tuple[str, str],
        known: dict[object, list[Place]],
        have: Mapping[int, Tensor] = NOTHING,
    ) -> Any:
        """Return values with all tokens.

        Args:
            where: name of the code, and of what it gets.
            known: see `WholeTokens`.
            have: some of the tensors with all tokens, by the id of this rank's.

        Raises:
            PatchError: the tokens of a tensor are not where they were in the first call.
        """
        call, state = self._call, self._state
        held = dict(_named_tensors(values))
        streams = self._streams()
        if not streams or not held:
            return values
        # Of what all ranks have alike: their own sizes may change on some of them only, and all must ask each other, or none.
        key = (*where, call.scope.name, tuple(held), tuple(state.lengths.items()), tuple(sorted(state.whole)))
        if key not in known:
            known[key] = self._places(list(held.values()), streams)
        made: dict[int, Tensor] = {}
        for (name, tensor), place in zip(held.items(), known[key], strict=True):
            if place is not None:
                streams_there, dim = place
                if dim >= tensor.ndim or tensor.shape[dim] != state.layout(streams_there).local_lengths[state.rank]:
                    raise PatchError(f"{where[0]}: {name.lstrip('.')} {tuple(tensor.shape)} had its tokens elsewhere before")
                whole = made[id(tensor)] = have[id(tensor)] if id(tensor) in have else call.gather_joint(tensor, *place)
                self._made.append(Copied(whole, tensor, whole._version, streams_there, dim))
                self._named.setdefault(name.rpartition(".")[2], place)
                self._shapes.setdefault(whole.shape, place)
        return self._replaced(values, made)

    def take(self, values: Any, streams: Streams) -> Any:
        """Return values with this rank's tokens of these streams."""
        made: dict[int, Tensor] = {}
        if not (streams and self._state.knows(streams)):
            return values
        layout = self._state.layout(streams)
        for _, tensor in _named_tensors(values):
            if tensor.ndim > 2 and tensor.shape[1] == layout.total != layout.local_lengths[self._state.rank]:
                made[id(tensor)] = local = layout.take_local(tensor, self._state.rank, 1)
                if self._state.copies is not None:
                    self._state.copies.append(Copied(tensor, local, local._version, streams, 1))
        return self._replaced(values, made) if made else values

    def local(self, out: Any) -> Any:
        """Return this rank's tokens of a result; the result itself if there were none."""
        if not self._shapes:
            return out
        made: dict[int, Tensor] = {}
        for name, tensor in _named_tensors(out):
            likely = (self._shapes.get(tensor.shape), self._named.get(name.rpartition(".")[2]), *self._shapes.values())
            for streams, dim in filter(None, likely):
                layout = self._state.layout(streams)
                if dim < tensor.ndim and tensor.shape[dim] == layout.total:
                    made[id(tensor)] = layout.take_local(tensor, self._state.rank, dim)
                    break
        return self._replaced(out, made)

    def _streams(self) -> list[Streams]:
        """Return the streams, and those in one attention, that are split now."""
        state, joint = self._state, [each for pair in self._call.scope.streams for each in pair]
        found = [*((name,) for name in state.lengths), *joint, *self._call.joint_streams]
        known = [each for each in dict.fromkeys(found) if each and state.knows(each) and not state.whole.issuperset(each)]
        plain = [each for each in known if state.grids.keys().isdisjoint(each)]
        return [each for each in plain if any(length != state.layout(each).total for length in state.layout(each).local_lengths)]

    def _places(self, held: list[Tensor], streams: list[Streams]) -> list[Place]:
        """Find out together with the other ranks which dimensions count tokens. A collective of a number per tensor."""
        state, masks = self._state, []
        for tensor in held:
            fits = [
                place
                for place, (each, dim) in enumerate(_choices(streams))
                if dim < tensor.ndim and tensor.shape[dim] == state.layout(each).local_lengths[state.rank]
            ]
            masks.append(sum(1 << place for place in fits))
        ranks = self._call.mesh.whole
        (told,) = ranks.all_gather([torch.tensor([masks], device=ranks.device)], [1] * ranks.size, 0)
        choices = _choices(streams)
        common = [-1] * len(held)
        for row in told.tolist():
            common = [one & other for one, other in zip(common, row, strict=True)]
        return [next((choices[place] for place in range(len(choices)) if mask >> place & 1), None) for mask in common]

    def _replaced(self, value: Any, made: Mapping[int, Tensor]) -> Any:
        if isinstance(value, Tensor):
            return made.get(id(value), value)
        if isinstance(value, dict):
            if OVERRIDE in value:
                return self._options(value)
            return {key: self._replaced(item, made) for key, item in value.items()}
        if isinstance(value, (list, tuple)) and next(tensors(value), None) is not None:
            items = [self._replaced(item, made) for item in value]
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
        if isinstance(value, (list, tuple)):
            return type(value)(self._replaced(item, made) for item in value) if _has_dict(value) else value
        return value

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Have options count all tokens."""
        joint = next((each for each in self._call.joint_streams if self._state.knows(each)), None)
        if IMG_SLICE not in options or joint is None:
            return options
        lengths = [self._state.lengths[name] for name in joint]
        if all(each is not options for each, _ in self._counts):  # in place: patches write there for each other
            self._counts.append((options, options[IMG_SLICE]))
            options[IMG_SLICE] = [sum(lengths[:-1]), sum(lengths)]
        return options

    @contextmanager
    def own_counts(self) -> Iterator[None]:
        """Have options count this rank's tokens, while active."""
        whole = [options[IMG_SLICE] for options, _ in self._counts]
        for options, own in self._counts:
            options[IMG_SLICE] = own
        try:
            yield
        finally:
            for (options, _), count in zip(self._counts, whole, strict=True):
                options[IMG_SLICE] = count


def _has_dict(values: Any) -> bool:
    return any(isinstance(value, dict) for value in values)


def _choices(streams: list[Streams]) -> list[tuple[Streams, int]]:
    """Return the possible places of tokens, as many as an integer has bits. The likeliest first: tokens are the second dimension as
    a rule, then the third, of heads or of positions."""
    return [(each, dim) for dim in (1, 2, 3, 0, 4, 5) for each in streams][:BITS]


def _named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of arguments by path, but those of options."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items() if OVERRIDE not in value else ():
            yield from _named_tensors(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _named_tensors(item, f"{path}.{index}")
