"""Cards that are not there: every line that runs on CUDA tensors only, run and checked without a GPU.

A tensor on such a card says that it is on `cuda:N`, and its numbers are on the CPU (`tensors.py`). What a card would refuse is
refused: operands on two devices, more memory than it has (`memory.py`), a tensor on the card for gloo, one on the CPU for NCCL
(`groups.py`). What would make the host wait is noted with its place in the code. The functions of `torch.cuda` answer for such a
card (`device.py`), and its attention kernels return what torch's do, in torch's forms (`kernels.py`).

It computes in the order of the program. What goes wrong on a card because streams run beside each other, what its own kernels
compute, and any time are not seen.

In one process `use(cards())`; for a server and its ranks the environment that `environment()` returns, with this folder's
neighbour `detection` on PYTHONPATH.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "CP_TEST_CARDS"
LINK = "CP_TEST_LINK"
"""Environment variable: what NCCL's messages do, `hang`, `garble` or `fail`; with ` p2p` behind it only while NCCL_P2P_DISABLE is
not 1."""
FLOAT32 = ("--fp32-unet", "--force-fp32", "--fp32-vae", "--fp32-text-enc")
"""What makes ComfyUI compute on a card as precisely as on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Cards:
    """Cards of a machine.

    Args:
        count: how many.
        gigabytes: of each.
        ledger: a file in which all processes note what they hold; without one, those that were forked share it.
    """

    count: int = 1
    gigabytes: float = 8.0
    ledger: Path | None = None


def environment(cards: Cards) -> dict[str, str]:
    """What a process needs to find them there."""
    return {VARIABLE: f"{cards.count}:{cards.gigabytes}:{cards.ledger or ''}"}


def wanted() -> Cards | None:
    """What the environment says."""
    count, _, rest = os.environ.get(VARIABLE, "").partition(":")
    gigabytes, _, ledger = rest.partition(":")
    if not count:
        return None
    return Cards(count=int(count), gigabytes=float(gigabytes or Cards.gigabytes), ledger=Path(ledger) if ledger else None)


def use(cards: Cards) -> None:
    """Have them in this process, from now on. Imports torch."""
    from . import device, groups, memory, messages, tensors

    memory.start(cards)
    messages.files = cards.ledger
    device.install(cards)
    groups.install()
    tensors.install()
