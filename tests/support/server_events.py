"""What a ComfyUI server says: how prompts end, and the events on its websocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

_PREVIEW_EVENTS = {1: 8, 4: None}
"""Binary events that hold an image, and where the image starts. None: after a JSON text whose length comes first."""
_TEXT_EVENT = 3
"""Binary event with the id of a node and a text to show in it."""
_ENDS = ("execution_success", "execution_error", "execution_interrupted")
"""Events with which a prompt ends."""


class ServerError(RuntimeError):
    """The server did not start, ended, or answered with an error."""


class PromptRejected(ServerError):
    """The server found the prompt invalid. `node_errors` says why, by node id."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.error: dict[str, Any] = answer.get("error", {})
        self.node_errors: dict[str, Any] = answer.get("node_errors", {})
        super().__init__(json.dumps(answer, indent=1))


@dataclass(frozen=True, kw_only=True)
class NodeError:
    """The exception that ended a prompt."""

    node_id: str
    node_type: str
    exception_type: str
    exception_message: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a prompt ended.

    Args:
        messages: `(event, data)` of the execution, in order.
        outputs: what the output nodes showed, by node id.
        seconds: from the start to the end of the execution, by the server's clock.
        cached: nodes that were not executed, because nothing they depend on had changed.
    """

    prompt_id: str
    status: Literal["success", "error", "interrupted"]
    messages: list[tuple[str, dict[str, Any]]] = field(repr=False)
    outputs: dict[str, dict[str, Any]]
    error: NodeError | None
    seconds: float
    cached: list[str]

    @property
    def report(self) -> dict[str, Any]:
        """What the CP Sampler of a prompt of `graphs` reports."""
        return json.loads(self.outputs["report"]["text"][0])

    def check(self) -> Result:
        """This result, or ServerError with the traceback of the node when the prompt did not succeed."""
        if self.status != "success":
            detail = f"{self.error.exception_message}\n{self.error.traceback}" if self.error else ""
            raise ServerError(f"prompt {self.status}: {detail}")
        return self


@dataclass(frozen=True, kw_only=True)
class Event:
    """One message on the websocket.

    Args:
        time: when it came in, on the clock of time.monotonic().
        type: the event's name, `preview` for a preview image, `text` for a text shown in a node.
        data: the JSON data; for a preview the bytes of the image, for a text (id of the node, text).
    """

    time: float
    type: str
    data: Any


class Listener:
    """A thread that collects the events of one websocket connection.

    Args:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        self.client_id = uuid.uuid4().hex
        self._url = f"http://127.0.0.1:{port}/ws?clientId={self.client_id}"
        self._events: list[Event] = []
        self._ended: set[str] = set()  # ids of prompts
        self._changed = threading.Condition()
        self._loop, self._connected = asyncio.new_event_loop(), Future[None]()
        self._thread = threading.Thread(target=self._run, name="comfy-events", daemon=True)
        self._thread.start()
        self._connected.result(20.0)

    def snapshot(self) -> list[Event]:
        with self._changed:
            return list(self._events)

    def wait(self, condition: Callable[[Event], bool], timeout: float, since: float) -> Event:
        deadline = time.monotonic() + timeout
        seen = 0
        with self._changed:
            while True:
                for event in self._events[seen:]:
                    if event.time >= since and condition(event):
                        return event
                seen = len(self._events)
                if not self._changed.wait(deadline - time.monotonic()):
                    recent = [event.type for event in self._events[-20:]]
                    raise TimeoutError(f"no such event within {timeout} s; the last ones were {recent}")

    def wait_end(self, prompt_id: str, timeout: float) -> bool:
        """Wait for the event with which a prompt ends; False if there was none."""
        with self._changed:
            return self._changed.wait_for(lambda: prompt_id in self._ended, timeout)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._listening.cancel)
        self._thread.join(5.0)

    def _run(self) -> None:
        self._listening = self._loop.create_task(self._listen())
        try:
            self._loop.run_until_complete(self._listening)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # noqa: BLE001  (raised where the connection is waited for)
            if not self._connected.done():
                self._connected.set_exception(error)
        finally:
            self._loop.close()

    async def _listen(self) -> None:
        async with aiohttp.ClientSession() as session, session.ws_connect(self._url, max_msg_size=0) as socket:
            self._connected.set_result(None)
            async for message in socket:
                event = _event(message.data)
                if event is not None:
                    with self._changed:
                        self._events.append(event)
                        if event.type in _ENDS:
                            self._ended.add(event.data["prompt_id"])
                        self._changed.notify_all()


def _event(frame: str | bytes) -> Event | None:
    now = time.monotonic()
    if isinstance(frame, str):
        message = json.loads(frame)
        return Event(time=now, type=message["type"], data=message.get("data"))
    if len(frame) < 8:
        return None
    number, length = struct.unpack(">II", frame[:8])
    if number == _TEXT_EVENT:
        return Event(time=now, type="text", data=(frame[8 : 8 + length].decode(), frame[8 + length :].decode()))
    if number not in _PREVIEW_EVENTS:
        return Event(time=now, type=f"binary_{number}", data=frame[4:])
    start = _PREVIEW_EVENTS[number]
    return Event(time=now, type="preview", data=frame[8 + length if start is None else start :])


def result_of(prompt_id: str, entry: dict[str, Any]) -> Result:
    messages = [(name, data) for name, data in entry["status"]["messages"]]
    by_name = dict(messages)
    error = None
    status: Literal["success", "error", "interrupted"] = "success" if entry["status"]["completed"] else "error"
    if "execution_interrupted" in by_name:
        status = "interrupted"
    elif "execution_error" in by_name:
        data = by_name["execution_error"]
        error = NodeError(
            node_id=str(data["node_id"]),
            node_type=data["node_type"],
            exception_type=data["exception_type"],
            exception_message=data["exception_message"],
            traceback="".join(data["traceback"]),
        )
    stamps = [data["timestamp"] for _, data in messages if "timestamp" in data]
    return Result(
        prompt_id=prompt_id,
        status=status,
        messages=messages,
        outputs=entry["outputs"],
        error=error,
        seconds=(stamps[-1] - stamps[0]) / 1000 if stamps else 0.0,
        cached=list(by_name.get("execution_cached", {}).get("nodes", [])),
    )
