"""The files of a loaded model, with a check that they have not changed.

Weights are pages of the file, on ranks and in ComfyUI's process. A write to the file changes them, at once or when a page is next
read. A renamed or removed file stays as it is for those who have it open, whatever gets its name.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ...errors import ChangedFileError
from ...system import system
from .recipe import FileStamp, date, file_stamp, readable


class ModelFiles:
    """Files that stay open for the lifetime of this object. `files`: path of each, and its state when ComfyUI had loaded it.

    Raises:
        ChangedFileError: one has another state now.
        MirrorError: one is gone.
    """

    def __init__(self, files: Iterable[tuple[str, FileStamp]]) -> None:
        self._files: dict[int, tuple[str, os.stat_result]] = {}
        for path, stamp in files:
            with readable(path):
                descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, descriptor).atexit = False
            found = os.fstat(descriptor)
            self._files[descriptor] = path, found
            if file_stamp(descriptor) != tuple(stamp):
                raise _changed(path, found, stamp[0] if stamp else 0)

    @property
    def path(self) -> str:
        """A path of the first file that leads to it in this process, whatever has its name."""
        return system.path_of(next(iter(self._files)))

    def check(self) -> None:
        """Raise ChangedFileError if one was written to. The time of the write may have been put back; that of the inode cannot."""
        for descriptor, (path, before) in self._files.items():
            now = os.fstat(descriptor)
            written = (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns)
            if written or (now.st_ctime_ns != before.st_ctime_ns and not _has_other_names(path, before, now)):
                raise _changed(path, now, before.st_size)
            self._files[descriptor] = path, now

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Check before and after the body of the context: also where it failed, as the cause may be the file."""
        self.check()
        try:
            yield
        finally:
            self.check()


def _has_other_names(path: str, before: os.stat_result, now: os.stat_result) -> bool:
    """Return whether a file was renamed, removed or linked: these, too, change the time of its inode."""
    try:
        return now.st_nlink != before.st_nlink or not os.path.samestat(os.stat(path), now)
    except OSError:
        return True


def _changed(path: str, now: os.stat_result, size: int) -> ChangedFileError:
    return ChangedFileError(
        f"{path} changed on disk after ComfyUI had loaded it: it has {now.st_size} bytes and is of {date(now.st_ctime_ns)}; it had "
        f"{size} bytes. Queue the prompt again: it is loaded anew. To replace a file that is in use, {system.to_replace(path)}"
    )
