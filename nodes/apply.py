"""Apply Context Parallel: MODEL in, MODEL out."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..cp_runtime.comfy.ui.apply import apply_to_model, overrules
from ..cp_runtime.comfy.ui.patcher import executing_node
from ..cp_runtime.comfy.ui.server import tell_overruling
from ..cp_runtime.pool.config import RuntimeConfig
from .config import ALIASES, CATEGORY, WANTED, CPConfigType


class ApplyContextParallel(io.ComfyNode):
    """A node that lets several devices compute every denoise call of a model together."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ApplyContextParallel",
            display_name="Apply Context Parallel",
            category=CATEGORY,
            search_aliases=[*ALIASES, *WANTED],
            description="All GPUs work on each step together, so you get the same picture or video in less time. Put it between "
            "the model (and its LoRAs) and any sampler or guider; nothing else is needed. The workers start with the first "
            "sampling run, which takes about ten seconds, and stay. A model that is too large for one device is sharded over all "
            "of them.",
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="A model from Load Diffusion Model, Load Checkpoint or Unet Loader (GGUF); LoRA loaders can go before "
                    "or after this node.",
                ),
                CPConfigType.Input(
                    "cp_config",
                    optional=True,
                    tooltip="From CP Config, to choose devices or how a call is split. Without it: all devices, and the fastest "
                    "split.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The same model, computed on all devices. Connect it to any sampler or guider.")],
        )

    @classmethod
    def execute(cls, model: Any, cp_config: RuntimeConfig | None = None) -> io.NodeOutput:
        applied = apply_to_model(model, cp_config)
        tell_overruling(executing_node(), overrules(model, cp_config))
        return io.NodeOutput(applied)
