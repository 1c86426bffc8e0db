"""Context parallelism for ComfyUI."""

from comfy_api.latest import ComfyExtension

from .nodes import NODES

WEB_DIRECTORY = "./web"


class ContextParallelExtension(ComfyExtension):
    """The node pack."""

    async def get_node_list(self) -> list:
        return NODES


async def comfy_entrypoint() -> ContextParallelExtension:
    return ContextParallelExtension()
