"""Tells the browser over ComfyUI's websocket what the workers are doing, whenever that changes."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from .controller import CONTROLLER, Controller
from .journal import Node
from .status import ending, status

log = logging.getLogger("context_parallel")

EVENT = "context_parallel.status"
LOOK = 1.0  # seconds between two looks while there are workers: a rank that died in between told nobody
PAUSE = 0.2  # seconds at least between two events
GRAIN = 16 << 20  # bytes; less is no news


def start_events(server: Any, controller: Controller = CONTROLLER) -> None:
    """Send what `status` returns as `EVENT` to every client of ComfyUI's `PromptServer`, and what happens now as text in the node
    that waits for it, to the client that queued it. Where its prompt fails there or is cancelled, the text says so. Nothing is sent
    while there are no workers."""

    def run() -> None:
        events = Events(server, controller)
        while True:
            controller.changed.wait(LOOK if controller.workers is not None else None)
            controller.changed.clear()
            try:
                events.send()
            except Exception:
                if server.loop.is_closed():  # ComfyUI ends
                    return
                log.exception("the status of the workers could not be sent")
                time.sleep(LOOK)
            time.sleep(PAUSE)

    threading.Thread(target=run, name="context parallel events", daemon=True).start()


class Events:
    """What was sent last, and what is to be sent now."""

    def __init__(self, server: Any, controller: Controller) -> None:
        self._server, self._controller = server, controller
        self._sent = news(status(server, controller))
        self._user: tuple[Node | None, str | None] = None, None  # the last node that used the pool, and the client that queued it
        self._said: tuple[str, Node | None] = "", None

    def send(self) -> None:
        """Send what is new."""
        now = status(self._server, self._controller)
        new = news(now)
        if new != self._sent:
            self._sent = new
            self._server.send_sync(EVENT, now)
        before, node = self._user, self._controller.node
        if node not in (None, before[0]):
            self._user = node, self._server.client_id
        for user, client in (before, self._user):
            # The browser leaves a text where it is, and takes no empty one.
            self._say(ending(self._server, user) or (now["activity"] if user == node else ""), user, client)

    def _say(self, text: str, node: Node | None, client: str | None) -> None:
        if text and node is not None and client is not None and (text, node) != self._said:
            self._said = text, node
            self._server.send_progress_text(text.encode(errors="replace"), node.node_id, client)


def news(now: dict[str, Any]) -> Any:
    """What of a status is worth an event: all but heartbeats, and memory in large steps."""
    ranks = [
        {**rank, "seconds_since_heartbeat": None, "modules": None, "memory": {k: v // GRAIN for k, v in rank["memory"].items()}}
        for rank in now["ranks"]
    ]
    return {**now, "ranks": ranks}
