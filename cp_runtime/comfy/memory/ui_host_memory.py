"""Model files too large for this process's memory: their weights stay in the pages of the file while ComfyUI loads them.

Without DynamicVRAM ComfyUI copies a model's weights into memory of its own. A file that fits is left to it: what is copied does not
depend on the file any more. One that does not fit would end ComfyUI, so its weights are the mapped file, as those of the ranks are:
every process can have the pages, and the system can drop them. The mapping is private, so that whatever changes a weight in place
gets a page of its own. With DynamicVRAM ComfyUI maps the file itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import comfy.memory_management
import psutil

from ...engine.weights.files import MAPPED
from ..model.wire_loading import file_backed_weights

log = logging.getLogger("context_parallel")

SHARE = 0.8  # fraction of the free memory that a file may take: text encoders and pictures need some, too
GROUPS = Path("/sys/fs/cgroup")
# Control groups, version 2 and version 1: the folder, and the files for the limit, the use, and the pages of files in use.
_VERSIONS = (
    (GROUPS, "memory.max", "memory.current", ("active_file", "inactive_file")),
    (GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)


@contextlib.contextmanager
def weights_in_file(path: str) -> Iterator[bool]:
    """Have ComfyUI's loaders leave the weights of a file that does not fit where they are, inside the context. Yields whether it is
    such a file."""
    ours = sys.platform == "linux" and not comfy.memory_management.aimdo_enabled and path.lower().endswith(MAPPED)
    if not ours or _bytes(path) <= SHARE * free_host_memory():
        yield False
        return
    log.info(
        "%s (%.1f GB) does not fit into the %.1f GB of free memory: its weights stay in the pages of the file",
        os.path.basename(path),
        _bytes(path) / 1e9,
        free_host_memory() / 1e9,
    )
    with file_backed_weights():
        yield True


def free_host_memory(groups: str = "/proc/self/cgroup") -> int:
    """Return the bytes of memory that this process can still take, of the machine and of the container that it may run in.
    `groups`: file that names its control groups."""
    return min([int(psutil.virtual_memory().available), *_free_in_groups(groups)])


def _free_in_groups(groups: str) -> Iterator[int]:
    try:
        names = [line.split(":", 2) for line in Path(groups).read_text().splitlines()]
    except OSError:
        return
    for version, (root, limit, used, files) in enumerate(_VERSIONS):
        name = next((path for _, kinds, path in names if ("memory" in kinds.split(",") if version else not kinds)), None)
        if name is None:
            continue
        group = root / name.lstrip("/")
        for folder in (group, *group.parents):  # a group's limit holds for the groups in it
            if folder == root.parent:
                break
            with contextlib.suppress(OSError, ValueError, KeyError):  # no limit is "max", and the first group has no such files
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                taken = int((folder / used).read_text()) - sum(int(stat[kind]) for kind in files)
                yield max(0, int((folder / limit).read_text()) - taken)


def _bytes(path: str) -> int:
    with contextlib.suppress(OSError):  # a missing file is the loader's to report
        return os.path.getsize(path)
    return 0
