"""The panel's routes on ComfyUI's own server, under its rules about origins; and events when the workers' state changes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from comfy.model_management import InterruptProcessingException

from ...controller.journal import public_message
from ...controller.run_stats import Node
from ...errors import ContextParallelError, bad_value
from ...words import ENGLISH, Words, translations, words_in
from .hosts import HOSTS
from .patcher import executing_node
from .runtime import CONTROLLER, found_devices, prefer
from .status import ending, snapshot

log = logging.getLogger("context_parallel")
T = TypeVar("T")

EVENT = "context_parallel.status"
LOOK = 1.0  # seconds between two polls: a dead rank and a prompt without workers cause no notification
PAUSE = 0.2  # seconds at least between two events
GRAIN = 16 << 20  # bytes; less is not worth an event
LANGUAGES: dict[str, str] = {}
"""ComfyUI's language in each browser, by client id. Another client gets English."""
REMEMBERED_BROWSERS = 100  # browsers
NOTHING = " "  # the browser leaves a text as it is, and accepts no empty one
_checked: ContextVar[str | None] = ContextVar("_checked", default=None)
"""The client whose prompt a request brings; None outside of requests."""
_overruling: set[tuple[str, str]] = set()
"""Clients and nodes that show the text of `tell_overruling`."""


def add_pictures(server: Any, pack: Path) -> None:
    """Serve the help pages' pictures where the frontend looks: it joins links to the folder above a page's, GitHub to its own."""
    server.routes.static(f"/extensions/{pack.name}/images", pack / "web" / "docs" / "images")


def add_routes(server: Any) -> None:
    routes: web.RouteTableDef = server.routes

    async def answer(code: int = 200, **more: Any) -> web.Response:
        return web.json_response({**more, "status": (await asyncio.to_thread(snapshot, server)).described}, status=code)

    @routes.get("/context_parallel/status")
    async def get_status(_: web.Request) -> web.Response:
        """Return the state of the workers: see `Status`."""
        return web.json_response((await asyncio.to_thread(snapshot, server)).described)

    @routes.post("/context_parallel/restart")
    async def post_restart(_: web.Request) -> web.Response:
        """Kill the workers and start them again: `{"restarted": …, "error": …, "status": {…}}`; 500 where they did not start."""
        try:
            return await answer(restarted=await asyncio.wrap_future(CONTROLLER.restart()), error=None)
        except ContextParallelError as error:
            return await answer(500, restarted=False, **_said(error))

    @routes.post("/context_parallel/measure")
    async def post_measure(_: web.Request) -> web.Response:
        """Make the next run repeat one call on one device, for comparison: `{"status": {…}}`. Its result stays the same."""
        CONTROLLER.journal.measure()
        return await answer()

    @routes.delete("/context_parallel/measure")
    async def delete_measure(_: web.Request) -> web.Response:
        """Cancel the measurement of the next run or the current one: `{"status": {…}}`. The run goes on."""
        CONTROLLER.journal.cancel_measuring()
        return await answer()

    @routes.get("/context_parallel/devices")
    async def get_devices(_: web.Request) -> web.Response:
        """Return the devices to choose from: see `found_devices`."""
        return web.json_response(await asyncio.to_thread(found_devices))

    @routes.post("/context_parallel/settings")
    async def post_settings(request: web.Request) -> web.Response:
        """Store the settings of the panel's switches, see `prefer`: `{"error": …, "status": {…}}`; 400 for invalid ones."""
        try:
            await asyncio.to_thread(prefer, await _asked(request))
        except ContextParallelError as error:
            return await answer(400, **_said(error))
        return await answer(error=None)

    @routes.post("/context_parallel/hosts")
    async def post_hosts(request: web.Request) -> web.Response:
        """Look whether another computer can work for this one, see `Hosts.check`, by its name: `{"host": "gpubox"}`. Returns what
        `Hosts` knows of it: `{"host": …, "state": …, "reason": …, "devices": […], "error": …, "status": {…}}`. 400 for no name."""
        try:
            asked = await _asked(request)
            if asked.keys() != {"host"}:
                raise bad_value("body", asked, '{"host": "gpubox"}', "Send the name of one host.")
            return await answer(error=None, **await asyncio.wrap_future(HOSTS.check(asked["host"])))
        except ContextParallelError as error:
            return await answer(400, **_said(error))

    @routes.post("/context_parallel/language")
    async def post_language(request: web.Request) -> web.Response:
        """Give the texts of nodes in a browser its language: `{"client": id, "language": "zh"}`; 400 for anything else."""
        try:
            asked = await _asked(request)
            texts = [each for each in asked.values() if isinstance(each, str) and len(each) < 100]
            if asked.keys() != {"client", "language"} or len(texts) < 2:
                raise bad_value("language", asked, '{"client": id, "language": "zh"}', "Send both, as text.")
        except ContextParallelError as error:
            return web.json_response(_said(error), status=400)
        LANGUAGES.pop(asked["client"], None)
        LANGUAGES[asked["client"]] = asked["language"]
        while len(LANGUAGES) > REMEMBERED_BROWSERS:
            del LANGUAGES[next(iter(LANGUAGES))]
        return web.json_response({"error": None})


def _said(error: Exception) -> dict[str, Any]:
    """Return an error as the routes answer it: `{"error": …, "translations": {"zh": …}}`."""
    message = public_message(error)
    return {"error": message, "translations": translations(message)}


async def _asked(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in a request's body. Raises ConfigError if there is none."""
    found: Any = await request.read()
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(found)
    if not isinstance(found, dict):
        raise bad_value("body", found, "a JSON object", "Send a JSON object.")
    return found


def start_events(server: Any) -> None:
    """Send the status as `EVENT` to every client of ComfyUI's `PromptServer`, and the current activity as text to the waiting
    node, for the client that queued it. If its prompt fails or is cancelled, the text says so. Without workers, nothing is sent."""

    def run() -> None:
        events = Events(server)
        while True:
            CONTROLLER.journal.changed.wait(LOOK)
            CONTROLLER.journal.changed.clear()
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
    """The state of the events: the last one sent, and the one to send now."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._sent = news(snapshot(server).described)
        self._user: tuple[Node | None, str | None] = None, None  # the last node that used the pool, and the client that queued it
        self._said: tuple[str, Node | None] = "", None
        self._prompt = ""  # id of the last one that was seen
        # Nodes that have had a text, for the last prompt that had them; and those of them of which it is not known whether they run
        self._told: dict[tuple[str, str], Node] = {}
        self._waiting: set[tuple[str, str]] = set()

    def send(self) -> None:
        """Send an event if the status has changed, and texts to the nodes."""
        self._look_at_the_prompt()
        now = snapshot(self._server)
        plain = now.described
        new = news(plain)
        if new != self._sent:
            self._sent = new
            self._server.send_sync(EVENT, plain)
        before = self._user
        if now.node is not None and now.node != before[0] and now.node.prompt_id == self._prompt:  # else it was a prompt before
            self._user = now.node, self._server.client_id
        for user, client in (before, self._user):
            words, end = words_for(client), user and ending(self._server, user.prompt_id, user.node_id)
            self._say(words.say(end) if end else now.text(words, user), user, client)
        for client, node_id in [*self._waiting]:
            node, words = self._told[client, node_id], words_for(client)
            if (end := ending(self._server, node.prompt_id, node.node_id)) is not None:
                self._say(words.say(end or "node.cached"), node, client)

    def _look_at_the_prompt(self) -> None:
        """Clear the status of the last run, and the texts of nodes, once another prompt has begun."""
        run, newest = CONTROLLER.journal.run, newest_prompt(self._server)
        if newest is None or newest[0] == self._prompt:
            return
        self._prompt, graph, queued_by = newest
        # A link to a model, of any sampler or guider.
        samples = any(isinstance(each["inputs"].get("model"), list) for each in graph.values())
        now = CONTROLLER.journal.node
        mine = now is not None and now.prompt_id == self._prompt  # CP Sampler may have begun to measure a run
        if samples and not mine and not any(map(_shares_out, graph.values())):
            CONTROLLER.journal.bypassed(run)
        for (client, node_id), node in [*self._told.items()]:
            if node.prompt_id != self._prompt and graph.get(node_id, {}).get("class_type") == node.kind:
                if node == self._user[0]:
                    self._user = None, None
                kind = "elsewhere" if client != queued_by else "waiting" if _is_shared(graph, node_id) else "bypassed"
                self._say(words_for(client).say(f"node.{kind}"), node._replace(prompt_id=self._prompt), client)
                if kind == "waiting":
                    self._waiting.add((client, node_id))

    def _say(self, text: str, node: Node | None, client: str | None) -> None:
        if text and node is not None and client is not None and (text, node) != self._said:
            self._said = text, node
            self._told[client, node.node_id] = node
            self._waiting.discard((client, node.node_id))
            show_text(self._server, text, node, client)


def show_text(server: Any, text: str, node: Node, client: str) -> None:
    """Show a text under a node, and under the nodes of the subgraphs that it is in: the browser shows a text where its node is."""
    for at, sign in enumerate(f"{node.node_id}:"):
        if sign == ":":
            server.send_progress_text(text.encode(errors="replace"), node.node_id[:at], client)


def tell_overruling(node: Node | None, overrules: bool) -> None:
    """Say under an Apply Context Parallel that its settings take the place of those of an earlier one."""
    server = running_server()
    client = getattr(server, "client_id", None)
    if node is None or client is None:
        return
    if overrules:
        _overruling.add((client, node.node_id))
        show_text(server, words_now().say("node.overrules"), node, client)
    elif (client, node.node_id) in _overruling:
        _overruling.remove((client, node.node_id))
        show_text(server, NOTHING, node, client)


def words_for(client: str | None) -> Words:
    """Return the texts in the language of a browser, by its client id."""
    return words_in(LANGUAGES.get(client or "", ENGLISH))


def running_server() -> Any:
    """Return ComfyUI's `PromptServer`; None where its nodes run without one."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def words_now() -> Words:
    """Return the texts in the language of the browser whose prompt is checked or runs."""
    checked = _checked.get()
    return words_for(getattr(running_server(), "client_id", None) if checked is None else checked)


def note_client(prompt: dict[str, Any]) -> dict[str, Any]:
    """Note who sends a prompt, while ComfyUI checks it: a handler of prompts."""
    _checked.set(str(prompt.get("client_id", "")))
    return prompt


def in_own_language(run: Callable[..., T]) -> Callable[..., T]:
    """Have a function of a node raise its errors in the language of the browser whose prompt runs. The status has the
    English ones."""

    @functools.wraps(run)
    def spoken(*args: Any, **kwargs: Any) -> T:
        try:
            return run(*args, **kwargs)
        except InterruptProcessingException:
            raise
        except Exception as error:
            journal, node = CONTROLLER.journal, executing_node()
            runs = node is not None and node.prompt_id == journal.prompt.prompt_id  # and is not only checked
            if runs and (journal.last_error is None or journal.last_error.node != node):  # else it is known
                journal.fail(error, node)
            if isinstance(error, ContextParallelError):
                error.args = (words_now().error(str(error)),)
            raise

    return spoken


def _shares_out(node: Mapping[str, Any]) -> bool:
    """Return whether a node of a prompt shares a model out: CP Sampler does so with a config of its own."""
    return node["class_type"] == "ApplyContextParallel" or (node["class_type"] == "CPSampler" and "cp_config" in node["inputs"])


def _is_shared(graph: Mapping[str, Any], node_id: str) -> bool:
    """Return whether a node of a prompt runs on the ranks: it is one for pictures, or its model comes from one that shares out."""
    left, seen = [node_id], set()
    while left:
        if (node := graph.get(left.pop())) is None or id(node) in seen:
            continue
        seen.add(id(node))
        if _shares_out(node) or node["class_type"] in ("CPVAEDecode", "CPVAEEncode", "CPUpscaleImage"):
            return True
        links = {name: value[0] for name, value in node["inputs"].items() if isinstance(value, list) and value}
        left += [origin for name, origin in links.items() if "model" in name or "guider" in name]
    return False


def newest_prompt(server: Any) -> tuple[str, dict[str, Any], str | None] | None:
    """Return the id, the graph, and the client of the prompt that began last."""
    queue = server.prompt_queue
    with queue.mutex:
        last = next(reversed(queue.history.values()), {"prompt": None})["prompt"]
        begun = next(reversed(queue.currently_running.values()), last)
    return None if begun is None else (begun[1], begun[2], begun[3].get("client_id"))


def news(now: dict[str, Any]) -> Any:
    """Return the part of a status that is worth an event: all but heartbeats, and memory in large steps."""
    ranks = [
        {**rank, "seconds_since_heartbeat": None, "modules": None, "memory": {k: v // GRAIN for k, v in rank["memory"].items()}}
        for rank in now["ranks"]
    ]
    return {**now, "ranks": ranks}
