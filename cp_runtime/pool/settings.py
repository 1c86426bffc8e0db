"""The table of the user's settings, which `RuntimeConfig.resolve` takes: defaults, labels and limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..engine.ranks.config import EXCHANGES, ROTATE_METHODS
from ..errors import bad_value, check_choice, check_switch

WHOLE, SHARDED, OFFLOADED = PLACEMENTS = ("whole", "sharded", "offloaded")
"""Where ranks keep a model's weights: all on every device; 1/N on each; 1/N in the host's memory for each."""
STAGED = "staged"  # each has the blocks that it alone computes
MAX_MEMORY = 1 << 20  # GB; more is a typing error
MAX_STEP_TIMEOUT = 7 * 24 * 3600.0
MAX_RANKS = 1024  # the most that a user can ask for


@dataclass(frozen=True)
class Setting:
    """A setting.

    Args:
        default: says the type as well.
        label: for users; its name stays in saved workflows.
        options: of a text; empty = it is free, and checked in another way.
        least, most, step: of a number.
        allowed, remedy: of a number, for its error; empty = it depends on the machine, and is checked in another way.
        advanced: shown on demand.
        optional: newer than the first workflows.
    """

    default: bool | int | float | str
    label: str
    tooltip: str
    options: tuple[str, ...] = ()
    least: float = 0
    most: float = 0
    step: float | None = None
    allowed: str = ""
    remedy: str = ""
    advanced: bool = False
    optional: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError for a value that is not allowed on any machine."""
        if self.options:
            check_choice(name, value, self.options)
        elif isinstance(self.default, bool):
            check_switch(name, value)
        elif self.allowed:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and 0 <= value <= self.most and (value or not self.least)):
                raise bad_value(name, value, self.allowed, self.remedy)


# In this order saved workflows hold the values.
SETTINGS = {
    "world_size": Setting(
        0, "number of GPUs",
        "How many GPUs work together. 0 = all that ComfyUI sees; without any, 2 CPU processes, for trying out. 1 = as without "
        "this node. More GPUs save time and, for large models, memory.",
        most=MAX_RANKS,
    ),
    "devices": Setting(
        "", "which GPUs",
        "Which GPUs to use, such as cuda:0,cuda:2; gpubox/cuda:0 is one of the computer that ssh knows as gpubox. Empty = the "
        "first ones here. Change it to keep a GPU free, or to leave out a slow one. List the fastest first: it takes part in every "
        "call.",
    ),
    "ulysses_degree": Setting(
        0, "split of a call: ulysses",
        "Ranks (worker processes, one per GPU) that trade parts of the sequence for attention heads. 0 = choose: both degrees by "
        "tokens, heads and the measured speed of the link, or the factor that ring_degree leaves. For fast links: ranks wait "
        "during two exchanges per attention. The product of all degrees must equal the number of GPUs.",
        most=MAX_RANKS, advanced=True,
    ),
    "ring_degree": Setting(
        0, "split of a call: ring",
        "Ranks that pass keys and values around in a ring. 0 = choose, as for ulysses_degree. For more ranks than heads, and for "
        "slow links. Sends more than Ulysses with many ranks, but can send while it computes. Together with ulysses_degree: "
        "unified attention.",
        most=MAX_RANKS, advanced=True,
    ),
    "batch_degree": Setting(
        0, "split of a call: batch",
        "Groups of ranks that compute different CFG halves and batch items at the same time. 0 = choose: as many as the batch of "
        "a call divides by; the remaining factor splits the sequence. Costs least: groups exchange only the result. The only axis "
        "for UNets, so with CFG 1 and one image a UNet gets no faster.",
        most=MAX_RANKS, advanced=True,
    ),
    "rotate_method": Setting(
        "alltoall", "ring: how data moves",
        "How ring attention moves keys and values: alltoall = from neighbour to neighbour while it computes, with little memory; "
        "allgather = all at once, with more memory, for links with high latency. Without a ring it has no effect.",
        options=ROTATE_METHODS, advanced=True,
    ),
    "convert_to_fp32": Setting(
        True, "ring: merge in float32",
        "Ring attention merges its partial results in float32: more exact, a little slower. Off = in the model's precision. "
        "Without a ring it has no effect.",
        advanced=True,
    ),
    "ulysses_anything": Setting(
        True, "ulysses: uneven parts",
        "Accept token and head counts that do not divide by ulysses_degree. The result is exact either way; some ranks then have "
        "a little more to do. Off = stop with the numbers instead.",
        advanced=True,
    ),
    "ring_anything": Setting(
        True, "ring: uneven parts",
        "Accept token counts that do not divide by ring_degree. The result is exact either way; some ranks then have a little "
        "more to do. Off = stop with the numbers instead.",
        advanced=True,
    ),
    "backend": Setting(
        "auto", "communication library",
        "torch's communication library. auto = the usual one for the devices: nccl for CUDA, xccl for Intel, hccl for Ascend, "
        "gloo for CPU. Change it only for troubleshooting; gloo works nearly everywhere but is slow between GPUs.",
        options=("auto", "nccl", "gloo", "xccl", "hccl"), advanced=True,
    ),
    "on_unsupported": Setting(
        "error", "if a call cannot be split",
        "What to do if the model, or another node's change to it, cannot run on several devices: error = stop and say why; single "
        "device = write a warning to the log and run as without this node, at the speed of one device.",
        options=("error", "single device"),
    ),
    "step_timeout": Setting(
        600.0, "longest call, in seconds",
        "Seconds that one denoise call may take once the model is warm. After that the workers are killed and the prompt fails "
        "with the name of the rank that hangs. Raise it if a step really takes that long. Higher = a hanging rank is noticed "
        "later.",
        least=1.0, most=MAX_STEP_TIMEOUT, step=1.0,
        allowed=f"seconds above 0 and up to {MAX_STEP_TIMEOUT:.0f}", remedy="Set it well above the time of one sampling step.",
        advanced=True,
    ),
    "weights": Setting(
        "auto", "where the model is kept",
        "Where the ranks keep the model. whole = all of it on every device: fastest. sharded = 1/N of it on each, gathered block "
        "by block during the computation: for models larger than one device. offloaded = as sharded, in the computer's memory. "
        "staged = each device has some of the blocks, and computes these: the least traffic, but no faster than one device. "
        "auto = the first of these that fits. The result is the same.",
        options=("auto", *PLACEMENTS, STAGED), optional=True,
    ),
    "memory_per_rank": Setting(
        0.0, "GB to use of each GPU",
        "GB of its device that a rank may use, for the choice of weights = auto. 0 = all free memory. Set it to leave room for "
        "other programs.",
        most=float(MAX_MEMORY), step=0.1,
        allowed=f"GB from 0 (what is free) to {MAX_MEMORY}", remedy="Set it to what a rank may use of its device.",
        advanced=True, optional=True,
    ),
    "shares": Setting(
        "", "share of each GPU",
        "How much of the work each rank takes, such as 2,1 if the first is twice as fast as the second. Empty = equal shares on "
        "devices of one kind, by measured speed on others. The result is the same up to rounding.",
        advanced=True, optional=True,
    ),
    "ranks_per_call": Setting(
        "auto", "GPUs per call",
        "auto = a call runs on all ranks, on those of this computer, or on one, whichever is fastest; the others idle. A small "
        "picture over a slow link may be fastest on one. all = every rank takes part in every call. Degrees that you set are "
        "obeyed. Panel and report show the choice.",
        options=("auto", "all"), advanced=True, optional=True,
    ),
    "exchange": Setting(
        "exact", "data between GPUs",
        "How ranks send tokens to each other for attention. exact = as they are. 8 bit = half of the bytes, for slow links between "
        "GPUs: the picture changes a little, about as with an int8 model. Measure in the panel tells by how much.",
        options=EXCHANGES, advanced=True, optional=True,
    ),
}  # fmt: skip


def label_of(name: str) -> str:
    """Name a setting as users find it."""
    return f"“{SETTINGS[name].label}” of CP Config"


_NAMES = re.compile(rf"\b({'|'.join(name for name in SETTINGS if '_' in name)})\b")


def with_labels(message: str) -> str:
    """Put the labels that users see in front of the names that an error of settings begins with, and in place of those names in it
    that are no words of English."""
    names, colon, rest = message.partition(":")
    parts = names.split(" x ")
    if not all(part in SETTINGS for part in parts):
        return _NAMES.sub(lambda name: label_of(name[0]), message)
    rest = _NAMES.sub(lambda name: label_of(name[0]), rest)
    return " x ".join(f"{SETTINGS[part].label} ({part})" for part in parts) + colon + rest
