"""CP PipeFusion: calls pass through stages of the model, in patches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comfy_api.latest import io

from ..cp_runtime.comfy.ui.runtime import default_config
from ..cp_runtime.engine.ranks.config import PipelineSettings
from ..cp_runtime.errors import ConfigError, bad_value
from ..cp_runtime.pool.config import RuntimeConfig
from ..cp_runtime.pool.settings import with_labels
from .config import ALIASES, CATEGORY, CPConfigType

MAX_PATCHES, MAX_WARMUP = 64, 1000  # limits of the widgets: more is a typing error


class CPPipeFusion(io.ComfyNode):
    """A node that divides a model's blocks into stages, and calls into patches. It starts nothing."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPPipeFusion",
            display_name="CP PipeFusion",
            category=CATEGORY,
            search_aliases=[*ALIASES, "pipeline", "slow link", "ethernet"],
            description="Changes the picture slightly with more than one patch: after 20 steps the latent is off by about 1 % of "
            "its deviation, with a high CFG by 3 %. Only for links so slow that Apply Context Parallel alone gains nothing, and "
            "models that fit no device. Each device computes some of the model's blocks, and patches of the picture pass through "
            "the devices one behind the other. With one patch it is exact.",
            inputs=[
                io.Int.Input(
                    "stages",
                    default=0,
                    min=0,
                    max=1024,
                    tooltip="Parts of the model. 0 = one per rank. With fewer, the ranks of a stage share CFG halves, batch items "
                    "and tokens.",
                ),
                io.Int.Input(
                    "patches",
                    default=8,
                    min=1,
                    max=MAX_PATCHES,
                    tooltip="Parts of the tokens. 1 = exact, but no faster than one device unless CFG halves or batch items follow "
                    "each other. More keep the devices busier: with 2 stages, 8 patches gain up to 1.78 ×.",
                ),
                io.Int.Input(
                    "warmup_calls",
                    default=1,
                    min=1,
                    max=MAX_WARMUP,
                    tooltip="Exact calls at the beginning of a run, which are slower. More make the result more exact.",
                ),
                CPConfigType.Input("cp_config", optional=True, tooltip="From CP Config. Without it: all devices."),
            ],
            outputs=[CPConfigType.Output(display_name="cp_config", tooltip="Connect it to Apply Context Parallel or CP Sampler.")],
        )

    @classmethod
    def execute(cls, stages: int, patches: int, warmup_calls: int, cp_config: Any = None) -> io.NodeOutput:
        config = default_config() if cp_config is None else cp_config
        if not isinstance(config, RuntimeConfig):  # ComfyUI accepts any JSON in place of a link
            raise bad_value(
                "cp_config", config, "the output of a CP Config node, or nothing", "Connect one, or none for all devices."
            )
        if config.world_size == 1:
            return io.NodeOutput(config)
        settings = PipelineSettings(stages=stages or config.world_size, patches=patches, warmup_calls=warmup_calls)
        try:
            return io.NodeOutput(replace(config, pipeline=settings))
        except ConfigError as error:
            raise ConfigError(with_labels(str(error))) from None
