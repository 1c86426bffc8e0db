"""Fake CUDA devices ("cards"): every line that runs on CUDA tensors only, run and checked without a GPU.

The same devices can be Intel's (`xpu`) or Ascend's (`npu`), with the functions that torch and torch_npu have for those.

A tensor on such a card says that it is on `cuda:N`, and its numbers are on the CPU (`tensors.py`). What a card would refuse is
refused: operands on two devices, more memory than it has (`memory.py`), a tensor on the card for gloo, one on the CPU for NCCL
(`groups.py`), kernels that it is too old for (`kernels.py`). What would make the host wait is noted with its place in the code.
The functions of `torch.cuda` answer for such a card (`device.py`), and its attention kernels return what torch's do.

It computes in the order of the program. What could go wrong on a card because streams run beside each other is found by torch's
sanitizer (`races.py`), what is read before it was received is NaN (`messages.py`). What kernels compute is not seen, nor any time.

In one process `use(cards())`; for a server and its ranks the environment that `environment()` returns, with this folder's
neighbour `detection` on PYTHONPATH.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

VARIABLE = "CP_TEST_CARDS"
HIDDEN = "CP_TEST_HIDDEN_CARDS"
"""Environment variable: the cards of which ComfyUI's process sees the first only, as under Windows, and its ranks all."""
LINK = "CP_TEST_LINK"
"""Environment variable: what NCCL's messages do, `hang`, `garble` or `fail`; with ` p2p` behind it only while NCCL_P2P_DISABLE is
not 1. `slow`: to connect. `late`: they take a while, as cards do not reach each other's memory."""
FLOAT32 = ("--fp32-unet", "--force-fp32", "--fp32-vae", "--fp32-text-enc")
"""What makes ComfyUI compute on a card as precisely as on a CPU."""


class Kind(NamedTuple):
    """Of cards: name, compute capability, memory."""

    name: str
    capability: tuple[int, int]
    gigabytes: float


KINDS = {
    kind.name: kind
    for kind in (
        Kind("Tesla T4", (7, 5), 16.0), Kind("RTX 3090", (8, 6), 24.0), Kind("RTX 4090", (8, 9), 24.0), Kind("H100", (9, 0), 80.0),
        Kind("RTX 5090", (12, 0), 32.0), Kind("Stand-in card", (9, 0), 8.0),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cards:
    """Cards of a machine.

    Args:
        count: how many, all alike.
        kinds: names in `KINDS`, one per card, instead of a count.
        gigabytes: of each; None = as its kind has.
        ledger: a file in which all processes note what they hold; without one, those that were forked share it.
        dynamic: ComfyUI's server has DynamicVRAM.
        type: as torch names it: cuda, xpu or npu.
    """

    count: int = 1
    kinds: tuple[str, ...] = ()
    gigabytes: float | None = None
    ledger: Path | None = None
    dynamic: bool = False
    type: str = "cuda"

    def each(self) -> list[Kind]:
        """Return what is in every slot."""
        kinds = [KINDS[name] for name in self.kinds or ("Stand-in card",) * self.count]
        return [kind._replace(gigabytes=self.gigabytes or kind.gigabytes) for kind in kinds]


def environment(cards: Cards) -> dict[str, str]:
    """What a process needs to find them there: how many or which kinds, gigabytes, DynamicVRAM, type, ledger."""
    which = ",".join(cards.kinds) or cards.count
    parts = (which, cards.gigabytes or "", "dynamic" if cards.dynamic else "", cards.type, cards.ledger or "")
    return {VARIABLE: ":".join(map(str, parts))}


def hidden_environment(cards: Cards) -> dict[str, str]:
    """The same for a server that sees the first card only."""
    (all_of_them,) = environment(cards).values()
    first = Cards(kinds=cards.kinds[:1], gigabytes=cards.gigabytes)
    return {**environment(first), HIDDEN: all_of_them, "CUDA_VISIBLE_DEVICES": "0"}


def wanted(variable: str = VARIABLE) -> Cards | None:
    """What the environment says."""
    which, gigabytes, dynamic, kind, ledger = (*os.environ.get(variable, "").split(":", 4), *[""] * 4)[:5]
    if not which:
        return None
    kinds = () if which.isdecimal() else tuple(which.split(","))
    return Cards(
        count=len(kinds) or int(which), kinds=kinds, gigabytes=float(gigabytes) if gigabytes else None,
        ledger=Path(ledger) if ledger else None, dynamic=bool(dynamic), type=kind or "cuda",
    )  # fmt: skip


def use(cards: Cards) -> None:
    """Have them in this process, from now on. Imports torch."""
    from . import device, groups, memory, messages, tensors

    memory.start(cards)
    messages.files = cards.ledger
    device.install(cards)
    groups.install()
    tensors.install()
    if cards.dynamic:
        from . import dynamic_vram

        dynamic_vram.install()
