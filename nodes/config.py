"""CP Config: devices, number of ranks, and split of a call."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..cp_runtime.comfy.ui.runtime import device_inventory
from ..cp_runtime.errors import ConfigError
from ..cp_runtime.pool.config import RuntimeConfig
from ..cp_runtime.pool.settings import SETTINGS, Setting, with_labels

CPConfigType = io.Custom("CP_CONFIG")
CATEGORY = "context parallel"
ALIASES = ["context parallel", "cp"]
WANTED = [
    "ulysses", "ring attention", "usp", "xdit", "xfuser", "raylight", "ray", "fsdp", "deepspeed", "multigpu",
    "sequence parallel", "tensor parallel", "data parallel", "model parallel", "cfg parallel", "cfg split", "workers",
    "shard", "sharding", "faster", "speed up", "speedup", "slow", "too slow", "slow sampling", "takes too long",
    "gpu speed", "performance", "accelerate", "acceleration", "accelerator", "optimize", "optimise", "optimization",
    "boost", "quicker", "low fps", "inference speed", "split", "split model", "distributed", "distribute", "parallel",
    "nvlink", "nccl", "sli", "2 gpu", "2 gpus", "use 2 gpus", "3 gpus", "4 gpus", "8 gpus", "two gpus", "dual gpu",
    "second gpu", "multi gpu", "multiple gpu", "multiple gpus", "several gpus", "all gpus", "both gpus",
    "use both gpus", "combine gpus", "more gpus", "other gpu", "gpu 1", "two cards", "second card", "multi card",
    "graphics cards", "rtx", "2x 3090", "3090", "4090", "5090", "3060", "a100", "h100", "cluster", "network",
    "second computer", "two computers", "remote gpu", "vram", "not enough memory", "not enough vram", "out of memory",
    "out of vram", "cuda out of memory", "oom", "low vram", "insufficient memory", "memory error", "offload",
    "cpu offload", "block swap", "blockswap", "large model", "bigger model", "model too big", "model too large",
    "cuda", "显存", "爆显存", "显存不足", "内存不足", "加速", "提速", "太慢", "优化", "性能", "多显卡", "双显卡",
    "多卡", "双卡", "两张显卡", "多GPU", "并行", "分布式", "集群", "两台电脑", "模型太大", "卸载", "メモリ不足",
    "VRAM不足", "遅い", "遅すぎる", "速い", "高速化", "最適化", "複数GPU", "GPU 2枚", "グラボ2枚", "マルチGPU",
    "並列", "分散", "2台のPC", "モデルが大きすぎる", "オフロード",
]  # fmt: skip
"""Search terms of people who know nothing of context parallelism: they lead to the only node they need."""


def _input(name: str, setting: Setting) -> Any:
    default = setting.default
    common = {
        "default": default,
        "display_name": setting.label,
        "tooltip": setting.tooltip,
        "advanced": setting.advanced or None,
        "optional": setting.optional,
    }
    if isinstance(default, bool):
        return io.Boolean.Input(name, **common)
    if isinstance(default, str):
        return io.Combo.Input(name, options=list(setting.options), **common) if setting.options else io.String.Input(name, **common)
    kind = io.Int if isinstance(default, int) else io.Float
    return kind.Input(name, min=setting.least, max=setting.most, step=setting.step, **common)


class CPConfig(io.ComfyNode):
    """A node that describes the ranks. It starts nothing."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPConfig",
            display_name="CP Config",
            category=CATEGORY,
            search_aliases=[*ALIASES, "which gpus", "degrees"],
            description="Chooses which GPUs work together, and how each call of the model is split over them. Leave everything at "
            "its default to use all GPUs. The node itself starts nothing.",
            inputs=[_input(name, setting) for name, setting in SETTINGS.items()],
            outputs=[CPConfigType.Output(display_name="cp_config", tooltip="Connect it to Apply Context Parallel or CP Sampler.")],
        )

    @classmethod
    def validate_inputs(
        cls,
        world_size: Any = 0,
        devices: Any = "",
        ulysses_degree: Any = 0,
        ring_degree: Any = 0,
        batch_degree: Any = 0,
        backend: Any = "auto",
        shares: Any = "",
    ) -> bool:
        """Check the inputs that depend on the machine and on each other before the prompt is queued.

        It raises: ComfyUI repeats a returned text for each of these inputs, and the frontend then shows it in none of its toasts;
        an exception is shown once, in its own words.
        """
        given = {
            "world_size": world_size, "devices": devices, "ulysses_degree": ulysses_degree, "ring_degree": ring_degree,
            "batch_degree": batch_degree, "backend": backend, "shares": shares,
        }  # fmt: skip
        if None not in given.values():  # a linked input has no value yet
            cls.execute(**given)
        return True

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        try:
            return io.NodeOutput(RuntimeConfig.resolve(inventory=device_inventory(), **inputs))
        except ConfigError as error:
            raise ConfigError(with_labels(str(error))) from None
