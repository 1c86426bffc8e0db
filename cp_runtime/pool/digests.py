"""Digests of whole files, by which two computers tell whether they have the same one. They are kept: a file is read once."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ..cache import CacheFile

log = logging.getLogger("context_parallel")

PIECE = 16 << 20  # bytes that one thread reads at once
THREADS = min(8, os.cpu_count() or 1)  # SHA-256 is 0.4 to 1.4 GB/s in each
LARGE = 1 << 30  # bytes; reading so many is worth a line in the log


def content_digest(path: str, stamp: Sequence[int]) -> str:
    """Return a digest of all bytes of a file: the SHA-256 of those of its pieces.

    Args:
        stamp: changes whenever the file does. What was kept for another one does not count.

    Raises:
        OSError: it cannot be read.
    """
    kept, name = CacheFile("digests.json"), f"{socket.gethostname()}:{path}"  # a home may be that of several computers
    match kept.read().get(name):
        case {"stamp": known, "digest": str(found)} if known == list(stamp):
            return found
    began, size = time.monotonic(), stamp[0]
    if size >= LARGE:
        log.info("reading %s (%.1f GB) once, to compare it with that of another computer", os.path.basename(path), size / 1e9)
    with open(path, "rb") as file, ThreadPoolExecutor(THREADS, "context-parallel-digest") as threads:

        def piece(offset: int) -> bytes:
            return hashlib.sha256(os.pread(file.fileno(), PIECE, offset), usedforsecurity=False).digest()

        digest = hashlib.sha256(b"".join(threads.map(piece, range(0, size, PIECE)))).hexdigest()
    if size >= LARGE:
        log.info("%s is read, at %.1f GB/s", os.path.basename(path), size / 1e9 / (time.monotonic() - began))
    kept.put({name: {"stamp": list(stamp), "digest": digest}})
    return digest
