"""Routes on ComfyUI's own server, under its rules about origins. No port of our own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from aiohttp import web

from ...controller.journal import public_message
from ...errors import ContextParallelError, bad_value
from ...machines.wire import own_address
from ..ranks.ui import CONTROLLER, found_devices, prefer
from ..ranks.ui_machines import OTHERS, add_machines
from .ui_status import status


def add_routes(server: Any) -> None:
    """Add them to ComfyUI's `PromptServer`; ComfyUI serves each under `/api` as well."""

    async def get_status(_: web.Request) -> web.Response:
        """Return the state of the workers: see `status`."""
        return web.json_response(await asyncio.to_thread(status, server))

    async def post_restart(_: web.Request) -> web.Response:
        """Kill the workers and start them again: `{"restarted": …, "error": …, "status": {…}}`; 500 where they did not start."""
        restarted, error = False, None
        try:
            restarted = await asyncio.wrap_future(CONTROLLER.restart())
        except ContextParallelError as failure:
            error = public_message(failure)
        answer = {"restarted": restarted, "error": error, "status": await asyncio.to_thread(status, server)}
        return web.json_response(answer, status=200 if error is None else 500)

    async def post_measure(_: web.Request) -> web.Response:
        """Have the next run repeat one call on one device, to compare with: `{"status": {…}}`. Its result stays the same."""
        CONTROLLER.journal.measure()
        return web.json_response({"status": await asyncio.to_thread(status, server)})

    async def delete_measure(_: web.Request) -> web.Response:
        """Have it measure nothing, or stop: `{"status": {…}}`. The run goes on."""
        CONTROLLER.journal.cancel_measuring()
        return web.json_response({"status": await asyncio.to_thread(status, server)})

    async def get_devices(_: web.Request) -> web.Response:
        """Return the devices to choose from: see `found_devices`."""
        return web.json_response(await asyncio.to_thread(found_devices))

    async def post_settings(request: web.Request) -> web.Response:
        """Keep what the panel's switches say, see `prefer`: `{"error": …, "status": {…}}`; 400 where it is wrong."""
        error = None
        try:
            await asyncio.to_thread(prefer, await _asked(request))
        except ContextParallelError as failure:
            error = public_message(failure)
        answer = {"error": error, "status": await asyncio.to_thread(status, server)}
        return web.json_response(answer, status=200 if error is None else 400)

    async def get_machines(_: web.Request) -> web.Response:
        """Return other machines that work for this ComfyUI, or try to: `{"listens": …, "address": …, "machines": […]}`, without the
        code. `address`: this computer's in its network."""
        found = OTHERS.status()
        return web.json_response({"listens": found["code"] is not None, "address": own_address(), "machines": found["machines"]})

    async def post_machines(request: web.Request) -> web.Response:
        """`{"add": "address:port"}` listens there and answers with the code for the other machine; `{"remove": name}` sends one
        away, and with the last one stops listening. 400 where that fails: `{"error": …}`."""
        try:
            asked = await _asked(request)
            if asked.keys() not in ({"add"}, {"remove"}) or not all(isinstance(value, str) for value in asked.values()):
                raise bad_value("machines", asked, '{"add": "address:port"} or {"remove": name}', "Send one of the two, as text.")
            if "remove" in asked:
                await asyncio.to_thread(OTHERS.remove, asked["remove"])
                return web.json_response({"code": None})
            return web.json_response({"code": await asyncio.to_thread(add_machines, asked["add"])})
        except ContextParallelError as error:
            return web.json_response({"error": public_message(error)}, status=400)

    server.routes.get("/context_parallel/machines")(get_machines)
    server.routes.post("/context_parallel/machines")(post_machines)
    server.routes.get("/context_parallel/status")(get_status)
    server.routes.post("/context_parallel/restart")(post_restart)
    server.routes.post("/context_parallel/measure")(post_measure)
    server.routes.delete("/context_parallel/measure")(delete_measure)
    server.routes.get("/context_parallel/devices")(get_devices)
    server.routes.post("/context_parallel/settings")(post_settings)


async def _asked(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in a request's body. Raises ConfigError: there is none."""
    found: Any = await request.read()
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(found)
    if not isinstance(found, dict):
        raise bad_value("body", found, "a JSON object", "Send a JSON object.")
    return found
