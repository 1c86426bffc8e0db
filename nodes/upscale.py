"""CP Upscale Image: ComfyUI's Upscale Image (using Model), with its work on all ranks."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..cp_runtime.comfy.ui.upscale import run_upscale
from ..cp_runtime.pool.config import RuntimeConfig
from .config import ALIASES, CATEGORY, CPConfigType


class CPUpscaleImage(io.ComfyNode):
    """Upscale Image (using Model) on all ranks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPUpscaleImage",
            display_name="CP Upscale Image",
            category=CATEGORY,
            search_aliases=[*ALIASES, "upscale", "upscaler", "super resolution", "enlarge image", "ESRGAN", "upscale faster"],
            description="Upscale Image (using Model) on several devices together, with the same picture. Use it instead of that "
            "node. Devices share the pictures of a batch, and the tiles of a picture.",
            inputs=[
                io.UpscaleModel.Input("upscale_model", tooltip="From Load Upscale Model. Every rank gets a copy."),
                io.Image.Input("image", tooltip="The picture, or the frames of a video, to enlarge."),
                CPConfigType.Input(
                    "cp_config",
                    optional=True,
                    tooltip="From CP Config. Without it, the node runs on the ranks that already sample, or on all devices.",
                ),
            ],
            outputs=[io.Image.Output(tooltip="The enlarged picture or frames.")],
        )

    @classmethod
    def execute(cls, upscale_model: Any, image: Any, cp_config: RuntimeConfig | None = None) -> io.NodeOutput:
        from nodes import NODE_CLASS_MAPPINGS  # ComfyUI's module of that name

        stock = NODE_CLASS_MAPPINGS["ImageUpscaleWithModel"]
        return io.NodeOutput(
            run_upscale(upscale_model, image, cp_config, lambda model, pictures: stock.execute(model, pictures)[0])
        )
