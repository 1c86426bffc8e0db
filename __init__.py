"""Context parallelism for ComfyUI."""

from functools import partial
from pathlib import Path

from comfy_api.latest import ComfyExtension, io
from server import PromptServer

from .cp_runtime.comfy.ui.node_times import watch_nodes
from .cp_runtime.comfy.ui.runtime import import_ahead
from .cp_runtime.comfy.ui.server import add_pictures, add_routes, note_client, start_events
from .cp_runtime.comfy.ui.stock_loads import watch_stock_loads
from .nodes import NODES, SHARING

WEB_DIRECTORY = "./web"


class ContextParallelExtension(ComfyExtension):
    """The node pack."""

    async def on_load(self) -> None:
        watch_stock_loads()
        watch_nodes()
        server = getattr(PromptServer, "instance", None)
        if server is not None:  # none where ComfyUI's nodes run without its server
            add_routes(server)
            add_pictures(server, Path(__file__).parent)
            server.add_on_prompt_handler(note_client)
            server.add_on_prompt_handler(partial(import_ahead, {node.__name__ for node in SHARING}))
            start_events(server)

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES


async def comfy_entrypoint() -> ContextParallelExtension:
    return ContextParallelExtension()
