"""Checks a family's table against the model's own forward, in one process. Imports ComfyUI.

The stock forward is recorded. Then one rank of two runs with the table, without the other. Its collectives are answered from the
recording, and only if what the rank sends is its part of something that the stock forward had. Where it is not, the table is wrong:
the tracer says where, and which arguments may have been forgotten. The result must be that of the stock forward.

An argument that is as long as a stream and whole is no mistake in itself: an attention mask is, and a length may match by chance.
So these are only listed when the forward went wrong.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from cp_runtime.comfy.rank.forward import run_sharded
from cp_runtime.comfy.ui.interception import innermost_method
from cp_runtime.engine.call import RunningCall
from cp_runtime.engine.hooks import InstalledPlan
from cp_runtime.engine.plan import find_modules
from cp_runtime.engine.ranks.collectives import RankGroup
from cp_runtime.engine.ranks.config import ContextParallelConfig
from cp_runtime.engine.ranks.mesh import SequenceMesh
from cp_runtime.engine.state import CallState
from cp_runtime.families.family import FamilyPlan
from cp_runtime.nested import tensors

from .recording import Recording, copied, numbers, record, shapes_in, watched

WORLD = 2
# Attention needs one kind of collective only: keys and values of all ranks.
CONFIG = ContextParallelConfig(ring_degree=WORLD, rotate_method="allgather", ring_anything=True)
CLOSE = 1e-3
"""Largest difference, relative to the standard deviation, of what is the same but for rounding."""


class MismatchError(Exception):
    """What this rank sends is not its part of anything that the stock forward had."""


class NothingToCompareError(Exception):
    """This rank has no tokens here."""


def trace(model: nn.Module, plan: FamilyPlan, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """What is wrong with a plan, in one call; empty where the rank computes what the stock forward computes.

    Args:
        arguments: of the innermost forward, by name.
        options: entries of transformer_options.
    """
    forward = getattr(model, innermost_method(model))
    call = {**arguments, "transformer_options": dict(options)}
    planned: dict[str, set[str]] = {}  # path -> arguments in the table
    for pattern in (*plan.modules, *plan.outputs):
        for path, _ in find_modules(model, pattern):
            planned.setdefault(path, set()).update(plan.modules[pattern].inputs if pattern in plan.modules else ())
    recording = record(model, forward, copied(call), planned)
    try:
        return _Replay(model, plan, planned, recording, rank=1).run(forward, call)
    except NothingToCompareError:
        return _Replay(model, plan, planned, recording, rank=0).run(forward, call)


class _Replay:
    def __init__(
        self, model: nn.Module, plan: FamilyPlan, planned: Mapping[str, Set[str]], recording: Recording, rank: int
    ) -> None:
        self._model, self._plan, self._planned, self._recording, self._rank = model, plan, planned, recording, rank
        self._installed = InstalledPlan(model, plan)
        self._wholes = list(self._recorded())
        self._close: dict[int, float] = {}  # by id
        self._running: list[str] = []
        self._suspects: dict[str, None] = {}

    def run(self, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> list[str]:
        wrong = None
        try:
            with watched(self._model, self._enter, self._leave, self._attend):
                mesh = _Mesh(self._rank, self._answer)
                out, _ = run_sharded(self._installed, forward, copied(arguments), mesh, lambda shape: CONFIG)
            if not all(self._same(a, b, b) for a, b in zip(tensors(out), tensors(self._recording.output), strict=True)):
                wrong = "the result is not that of the stock forward"
        except NothingToCompareError:
            raise
        except Exception as error:  # noqa: BLE001  (a model may raise anything when a table gives it the wrong shapes)
            where = f"{self._running[-1]}: " if self._running else ""
            wrong = f"{where}{str(error) or type(error).__name__}"
        finally:
            self._installed.remove()
        residuals = [kind for kind, each in (arguments.get("control") or {}).items() if each and not self._plan.control.get(kind)]
        for kind in residuals:
            self._suspect(f"control has residuals of kind {kind!r}; the table does not say to which tokens they are added")
        return [] if wrong is None else [wrong, *self._suspects]

    def _recorded(self) -> Iterator[Tensor]:
        """Every tensor of the stock forward that a rank may send its part of."""
        for call in self._recording.attention:
            for tensor in (call.q, call.k, call.v, call.out):
                yield from (tensor, tensor.transpose(1, 2))
            if call.mask is not None:
                yield from (call.mask, call.mask.unsqueeze(1), call.mask[:, None, None])
        for module in self._recording.modules:
            for value in (*module.arguments.values(), module.output):
                if not isinstance(value, Tensor) and hasattr(value, "feats"):  # voxels, items behind each other
                    yield pad_sequence([value.feats[item] for item in value.layout], batch_first=True)
            for tensor in tensors([dict(module.arguments), module.output]):
                yield tensor
                if tensor.ndim == 5:  # tokens in frames, rows and columns
                    yield tensor.flatten(1, 3)

    def _answer(self, local: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
        """What an all-gather of this rank's `local` returns: the tokens of all ranks, one rank after the other."""
        start, count = sum(lengths[: self._rank]), lengths[self._rank]
        if not count:
            if sum(lengths):
                raise NothingToCompareError
            return local
        for layout in map(self._state.layout, self._joint()):
            if layout.owned_lengths != tuple(lengths):
                continue
            order = layout.gathered_order(local.device)
            for whole in self._wholes:
                if whole.ndim != local.ndim or whole.movedim(dim, 0).shape[1:] != local.movedim(dim, 0).shape[1:]:
                    continue
                spots = whole.shape[dim] - layout.total + 1  # other streams may lie in front
                if spots < 1:
                    continue
                # The first token alone, at all of them, to pass most of them by.
                firsts = whole.narrow(dim, int(order[start]), spots).to(local.dtype)
                near = self._near(local.narrow(dim, 0, 1), firsts, whole).movedim(dim, 0).reshape(spots, -1).all(1)
                for offset in near.nonzero().flatten().tolist():
                    gathered = whole.narrow(dim, offset, layout.total).index_select(dim, order).to(local.dtype)
                    if self._same(local, gathered.narrow(dim, start, count), whole):
                        return gathered
        raise MismatchError(
            f"what this rank has, {tuple(local.shape)}, is not its part of what the stock forward has: other tokens, streams in "
            "another order, or computed with something that is not split as they are"
        )

    def _same(self, local: Tensor, other: Tensor, whole: Tensor) -> bool:
        """Whether two parts of `whole` are equal but for rounding."""
        return local.shape == other.shape and bool(self._near(local, other, whole).all())

    def _near(self, local: Tensor, other: Tensor, whole: Tensor) -> Tensor:
        """Which elements are equal but for rounding."""
        equal = local == other
        if not local.is_floating_point() or not whole.is_floating_point():
            return equal
        return equal | ((local - other).abs() <= self._closeness(whole))

    def _closeness(self, whole: Tensor) -> float:
        key = id(whole)  # the recording and its output live as long as this
        if key not in self._close:
            self._close[key] = CLOSE * max(float(whole[whole.isfinite()].std(correction=0)), 1e-6)
        return self._close[key]

    @property
    def _call(self) -> RunningCall:
        call = self._installed.current
        if call is None:
            raise MismatchError("no call is running")
        return call

    @property
    def _state(self) -> CallState:
        return self._call.state

    def _joint(self) -> set[tuple[str, ...]]:
        """Streams that lie behind each other somewhere, as far as they are known by now."""
        found: set[tuple[str, ...]] = {(name,) for name in self._state.lengths}
        outputs = [o for each in self._plan.outputs.values() for o in (each if isinstance(each, Sequence) else [each]) if o]
        found |= {tuple([o.stream] if isinstance(o.stream, str) else o.stream or ()) for o in outputs}
        found |= {side for pair in self._plan.attention for side in pair}
        for module in self._plan.modules.values():
            transforms = [*module.inputs.values(), *module.outputs.values()]
            found |= {module.attention or (), module.keys or (), *(getattr(t, "streams", None) or () for t in transforms)}
        return {names for names in found if names and self._state.lengths.keys() >= set(names)}

    def _enter(self, path: str, _: nn.Module, arguments: Mapping[str, Any]) -> None:
        self._running.append(path)
        if path not in self._planned:
            return
        pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
        totals = {self._state.layout(streams).total: streams for streams in sorted(self._joint(), key=lambda s: (-len(s), s))}
        for name, value in arguments.items():
            if name.endswith("transformer_options"):
                continue
            for tensor in tensors(value):
                for dim, size in enumerate(tensor.shape):
                    if size > 1 and size in totals:
                        length = f"dimension {dim} is as long as {' + '.join(totals[size])}"
                        self._suspect(f"{pattern}({name}) {tuple(tensor.shape)}: {length}, and is not split")
            if name not in self._planned[path] and any(True for _ in numbers(value)):
                self._suspect(f"{pattern}({name}) is {shapes_in(value)!r}: if that counts tokens, the table must say so")

    def _suspect(self, text: str) -> None:
        self._suspects[text] = None

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def _attend(self, name: str, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        reached = kwargs.get("transformer_options") is not None or name in self._plan.attention_names
        if not reached and not self._call.attention_is_local:
            self._suspect(f"{name} is called without transformer_options: name it in attention_names")
        return function(*args, **kwargs)


class _Mesh(SequenceMesh):
    def __init__(self, rank: int, answer: Callable[[Tensor, Sequence[int], int], Tensor]) -> None:
        super().__init__(None)
        self.whole = _Group(rank, answer)


class _Group(RankGroup):
    """One of two ranks, whose collectives `answer` answers."""

    def __init__(self, rank: int, answer: Callable[[Tensor, Sequence[int], int], Tensor]) -> None:
        super().__init__(None)
        self.rank, self.size, self._answer = rank, WORLD, answer

    def all_gather(self, locals_: Sequence[Tensor], lengths: Sequence[int], dim: int) -> list[Tensor]:
        return [self._answer(local, lengths, dim % local.ndim) for local in locals_]
