"""Imports node packs on a rank, as ComfyUI's process has imported them: so that what they replace in ComfyUI and in torch, and the
layers that they bring, are the same here. `shared.fingerprint` says whether they are.

Packs register nodes and routes when they are imported. There is a server for that, made as ComfyUI makes it and never started.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import folder_paths
from comfy.cli_args import args

log = logging.getLogger("context_parallel.worker")

OWN = Path(__file__).resolve().parents[3]
FAILED: dict[str, str] = {}
"""Name of a pack that ends with an error -> the error."""
_imported: set[str] = set()


def import_packs(paths: Iterable[str]) -> None:
    """Import packs that are not there yet, by the paths of their files or folders in ComfyUI's process. On another computer a pack
    has the same name in a folder of its own."""
    for path in paths:
        name = os.path.basename(path)
        if name in _imported or Path(path).resolve() == OWN:
            continue
        _imported.add(name)
        here = next(filter(os.path.exists, (path, *(os.path.join(each, name) for each in _folders()))), None)
        if here is None:
            FAILED[name] = "it is not installed there"
            continue
        with _errors() as said:
            ended_well = _loop().run_until_complete(_load(here))
        log.info("imported the node pack %s", name)
        if not ended_well:
            FAILED[name] = said[-1] if said else "it cannot be imported there"


def _folders() -> list[str]:
    return list(folder_paths.get_folder_paths("custom_nodes"))


async def _load(path: str) -> bool:
    import nodes  # seconds: only ranks that need a pack have it

    return bool(await nodes.load_custom_node(path, module_parent="custom_nodes"))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of a server that is never started."""
    args.front_end_root = args.front_end_root or os.path.dirname(os.path.abspath(folder_paths.__file__))  # downloads none
    import server

    loop = asyncio.new_event_loop()
    server.PromptServer(loop)
    return loop


@contextmanager
def _errors() -> Iterator[list[str]]:
    """Collect ComfyUI's warnings about packs, while active."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage().strip().rpartition("\n")[2])

    listener = Listener(logging.WARNING)
    logging.getLogger().addHandler(listener)
    try:
        yield said
    finally:
        logging.getLogger().removeHandler(listener)
