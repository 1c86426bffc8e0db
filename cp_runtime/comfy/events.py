"""Tells the browser over ComfyUI's websocket what the workers are doing, whenever that changes."""

from __future__ import annotations

import threading
import time
from typing import Any

from .session import SESSION, Session
from .status import activity, status

EVENT = "context_parallel.status"
LOOK = 1.0  # seconds between two looks while there are workers: a rank that died in between told nobody
PAUSE = 0.2  # seconds at least between two events
GRAIN = 16 << 20  # bytes; less is no news


def start_events(server: Any, session: Session = SESSION) -> None:
    """Send what `status` returns as `EVENT` to every client of ComfyUI's `PromptServer`, and what happens now as text in the node
    that waits for it. Nothing is sent while there are no workers."""

    def run() -> None:
        sent, said = news(status(session)), ("", "")
        while True:
            session.changed.wait(LOOK if session.pool is not None else None)
            session.changed.clear()
            now = status(session)
            text, node = activity(session), session.node_id
            try:
                if news(now) != sent:
                    sent = news(now)
                    server.send_sync(EVENT, now)
                if text and node is not None and (text, node) != said:
                    said = text, node
                    server.send_progress_text(text, node)
            except RuntimeError:  # the event loop is closed: ComfyUI ends
                return
            time.sleep(PAUSE)

    threading.Thread(target=run, name="context parallel events", daemon=True).start()


def news(now: dict[str, Any]) -> Any:
    """What of a status is worth an event: all but heartbeats, and memory in large steps."""
    ranks = [
        {**rank, "seconds_since_heartbeat": None, "modules": None, "memory": {k: v // GRAIN for k, v in rank["memory"].items()}}
        for rank in now["ranks"]
    ]
    return {**now, "ranks": ranks}
