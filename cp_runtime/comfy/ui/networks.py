"""Networks that ranks have besides a model: of patches, and of ControlNets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from ..shared.objects import Settings, write
from .values import samples_of


class Network(NamedTuple):
    """What ranks know a network by.

    Args:
        run: in which that was found out.
        contents: of the network then.
        code: of it, by name.
    """

    key: str
    run: int
    contents: object
    code: Mapping[str, Any]


_known: WeakKeyDictionary[nn.Module, Network] = WeakKeyDictionary()
_numbers = itertools.count()


def identified(network: nn.Module, run: int) -> Network:
    """Return what ranks know a network by in a sampling run: something else, where it has changed since the last one. Raises
    MirrorError: it cannot be sent."""
    found = _known.get(network)
    if found is None or found.run != run:
        written = write(network, Settings(later=False))
        contents = written.data, samples_of(written)
        key = found.key if found is not None and found.contents == contents else f"m{next(_numbers)}"
        found = _known[network] = Network(key, run, contents, written.all_code)
    return found


def code_of_networks(networks: Iterable[nn.Module], run: int) -> dict[str, Any]:
    """Return the code of networks by name. Raises MirrorError: one cannot be sent."""
    return {name: code for network in networks for name, code in identified(network, run).code.items()}
