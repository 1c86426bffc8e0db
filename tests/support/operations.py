"""What every rank gave to torch.distributed: one log per rank, and where the logs of two ranks disagree.

NCCL matches operations by their order alone: ranks that share groups must enter them in one order, with the same operation, and one
must expect as many bytes as the other sends.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from cp_runtime.engine.exchange import exchange
from cp_runtime.engine.exchange.exchange import Exchange
from cp_runtime.engine.ranks import collectives

Entry = tuple[str, list[int], str, dict[int, int], dict[int, int]]
"""Name of the group and its ranks, operation, bytes to and bytes from every rank of it."""


def record() -> list[Entry]:
    """Log the operations of this process from now on, in the list that is returned."""
    log: list[Entry] = []

    def note(group: Any, operation: str, sent: Sequence[int], arriving: Sequence[int]) -> None:
        ranks = _ranks(group)
        to, source = (dict(zip(ranks, each, strict=True)) for each in (sent, arriving))
        log.append(((group or c10d._get_default_group()).group_name, ranks, operation, to, source))

    def same(group: Any, operation: str, nbytes: int) -> None:
        each = [nbytes] * dist.get_world_size(group)
        note(group, operation, each, each)

    def all_to_all(received: Any, send: Any, arriving: Any, sent: Any, group: Any) -> None:
        note(group, "all_to_all", [size * send.itemsize for size in sent], [size * received.itemsize for size in arriving])

    def messages(operations: list[Any]) -> None:
        group = operations[0].group

        def moved(kind: Any, rank: int) -> int:
            return sum(each.tensor.nbytes for each in operations if each.op is kind and each.peer == rank)

        note(group, "messages", *([moved(kind, rank) for rank in _ranks(group)] for kind in (dist.isend, dist.irecv)))

    notes: dict[str, Callable[..., None]] = {
        "start_all_to_all": all_to_all,
        "batch_isend_irecv": messages,
        "all_gather_into_tensor": lambda whole, part, group=None, **_: same(group, "all_gather", part.nbytes),
        "all_reduce": lambda value, op=None, group=None, **_: same(group, "all_reduce", value.nbytes),
        "broadcast": lambda value, src=None, group=None, **_: same(group, "broadcast", value.nbytes),
        "barrier": lambda group=None, **_: same(group, "barrier", 0),
        "new_subgroups_by_enumeration": lambda lists, **_: same(None, f"groups of {lists}", 0),
    }

    def logged(owner: Any, name: str) -> Any:
        run = getattr(owner, name)

        def noted_and_run(*args: Any, **kwargs: Any) -> Any:
            notes[name](*args, **kwargs)
            return run(*args, **kwargs)

        return noted_and_run

    def parts(self: Exchange, made: Any, sent: Sequence[int], arriving: Sequence[int]) -> None:
        note(_group_of(self), "messages", *([n * (to != self.rank) for to, n in enumerate(each)] for each in (sent, arriving)))

    def in_memory(self: Exchange, arriving: Sequence[Any], leaving: Sequence[Any]) -> None:
        def moved(side: Sequence[Any], rank: int) -> int:
            return sum(tensor.nbytes for other, tensor in side if other == rank)

        ranks = range(len(self.segments))
        note(_group_of(self), "messages", *([moved(side, rank) for rank in ranks] for side in (leaving, arriving)))

    notes |= {"parts": parts, "messages": in_memory}
    for name in notes:
        owner = next(owner for owner in (dist, collectives, Exchange) if hasattr(owner, name))
        setattr(owner, name, logged(owner, name))
    return log


def _group_of(found: Exchange) -> Any:
    return next(group for group, each in exchange._exchanges.items() if each is found)


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group or c10d._get_default_group())


def disagreements(logs: Sequence[Sequence[Entry]]) -> list[str]:
    """Return the first place where two ranks disagree, for each pair that does.

    Args:
        logs: of all ranks, in their order.
    """
    found = []
    for one, other in combinations(range(len(logs)), 2):
        mine, theirs = ([entry for entry in logs[rank] if {one, other} <= set(entry[1])] for rank in (one, other))
        if len(mine) != len(theirs):
            found.append(f"ranks {one} and {other}: {len(mine)} and {len(theirs)} operations")
        for number, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            there, back = (a[3][other], b[4][one]), (b[3][one], a[4][other])
            if a[:3] != b[:3] or there[0] != there[1] or back[0] != back[1]:
                found.append(f"ranks {one} and {other}, operation {number}: {a} and {b}")
                break
    return found
