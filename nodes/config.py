"""CP Config: which devices, how many ranks, how a call is split."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..cp_runtime.comfy.ranks.ui_devices import device_inventory
from ..cp_runtime.engine.config import ROTATE_METHODS
from ..cp_runtime.pool.config import (
    BACKENDS,
    DEFAULT_STEP_TIMEOUT,
    MAX_MEMORY,
    MAX_RANKS,
    MAX_STEP_TIMEOUT,
    ON_UNSUPPORTED,
    RANKS_PER_CALL,
    WEIGHTS,
    RuntimeConfig,
)  # fmt: skip

CPConfigType = io.Custom("CP_CONFIG")
CATEGORY = "context parallel"
ALIASES = ["context parallel", "cp", "ulysses", "ring attention", "usp", "xdit", "raylight"]
WANTED = [
    "faster", "speed up", "slow", "gpu speed", "split", "2 gpu", "two gpus", "dual gpu", "second gpu", "multi gpu", "multiple gpu",
    "several gpus", "all gpus", "nvlink", "distributed", "parallel", "sequence parallel",
    "加速", "多显卡", "多卡", "双卡", "多GPU", "并行", "高速化", "複数GPU", "並列",
]  # fmt: skip
"""What people type who know nothing of context parallelism: it leads to the one node that they need, and to no other."""


class CPConfig(io.ComfyNode):
    """Describes the ranks. Starts nothing."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPConfig",
            display_name="CP Config",
            category=CATEGORY,
            search_aliases=ALIASES,
            description="Chooses the devices that work together on one denoise call, and how it is split over them. Leave "
            "everything at its default to use all devices. The node itself starts nothing.",
            inputs=[
                io.Int.Input(
                    "world_size",
                    default=0,
                    min=0,
                    max=MAX_RANKS,
                    tooltip="Number of worker processes (ranks), one per device. 0 = every visible accelerator; on a machine "
                    "without any, 2 CPU ranks. 1 passes the model through unchanged. More ranks save time and, with sharded "
                    "weights, memory.",
                ),
                io.String.Input(
                    "devices",
                    default="",
                    tooltip="Devices to use, such as cuda:0,cuda:2. Empty = the first world_size devices. Change it to keep a "
                    "device free, or to leave out a slow one. List the fastest first: rank 0 takes part in every call.",
                ),
                io.Int.Input(
                    "ulysses_degree",
                    default=0,
                    min=0,
                    max=MAX_RANKS,
                    tooltip="Ranks that trade parts of the sequence for attention heads. 0 = choose: both degrees by tokens, heads "
                    "and the measured speed of the link, or the factor that ring_degree leaves. For fast links: ranks wait during "
                    "two exchanges per attention. The product of all degrees must equal the world size.",
                    advanced=True,
                ),
                io.Int.Input(
                    "ring_degree",
                    default=0,
                    min=0,
                    max=MAX_RANKS,
                    tooltip="Ranks that pass keys and values around in a ring. 0 = choose, as for ulysses_degree. For more ranks "
                    "than heads, and for slow links. Sends more than Ulysses with many ranks, but can send while it computes. "
                    "Together with ulysses_degree: unified attention.",
                    advanced=True,
                ),
                io.Int.Input(
                    "batch_degree",
                    default=0,
                    min=0,
                    max=MAX_RANKS,
                    tooltip="Groups of ranks that compute different CFG halves and batch items at the same time. 0 = choose: as "
                    "many as the batch of a call divides by; the remaining factor splits the sequence. Costs least: groups "
                    "exchange only the result. The only axis for UNets, so with CFG 1 and one image a UNet gets no faster.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "rotate_method",
                    options=list(ROTATE_METHODS),
                    default="alltoall",
                    tooltip="How ring attention moves keys and values: alltoall = from neighbour to neighbour while it computes, "
                    "with little memory; allgather = all at once, with more memory, for links with high latency. Without a ring it "
                    "has no effect.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "convert_to_fp32",
                    default=True,
                    tooltip="Ring attention merges its partial results in float32: more exact, a little slower. Off = in the "
                    "model's precision. Without a ring it has no effect.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "ulysses_anything",
                    default=True,
                    tooltip="Accept token and head counts that do not divide by ulysses_degree. The result is exact either way; "
                    "some ranks then have a little more to do. Off = stop with the numbers instead.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "ring_anything",
                    default=True,
                    tooltip="Accept token counts that do not divide by ring_degree. The result is exact either way; some ranks "
                    "then have a little more to do. Off = stop with the numbers instead.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "backend",
                    options=list(BACKENDS),
                    default="auto",
                    tooltip="torch's communication library. auto = the usual one for the devices: nccl for CUDA, gloo for CPU. "
                    "Change it only for troubleshooting; gloo works nearly everywhere but is slow between GPUs.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "on_unsupported",
                    options=list(ON_UNSUPPORTED),
                    default="error",
                    tooltip="What to do if the model, or another node's change to it, cannot run on several devices: error = stop "
                    "and say why; single device = write a warning to the log and run as without this node, at the speed of one "
                    "device.",
                    advanced=True,
                ),
                io.Float.Input(
                    "step_timeout",
                    default=DEFAULT_STEP_TIMEOUT,
                    min=1.0,
                    max=MAX_STEP_TIMEOUT,
                    step=1.0,
                    tooltip="Seconds that one denoise call may take once the model is warm. After that the workers are killed and "
                    "the prompt fails with the name of the rank that hangs. Raise it if a step really takes that long. Higher = a "
                    "hanging rank is noticed later.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "weights",
                    options=list(WEIGHTS),
                    default="auto",
                    tooltip="Where the ranks keep the model. whole = all of it on every device: fastest. sharded = 1/N of it on "
                    "each, gathered block by block during the computation: for models larger than one device. offloaded = as "
                    "sharded, in the computer's memory. auto = the first of these that fits. The result is the same.",
                    advanced=True,
                    optional=True,
                ),
                io.Float.Input(
                    "memory_per_rank",
                    default=0.0,
                    min=0.0,
                    max=float(MAX_MEMORY),
                    step=0.1,
                    tooltip="GB of its device that a rank may use, for the choice of weights = auto. 0 = all free memory. Set it "
                    "to leave room for other programs.",
                    advanced=True,
                    optional=True,
                ),
                io.String.Input(
                    "shares",
                    default="",
                    tooltip="How much of the work each rank takes, such as 2,1 if the first is twice as fast as the second. Empty "
                    "= equal shares on devices of one kind, by measured speed on others. The result is the same up to rounding.",
                    advanced=True,
                    optional=True,
                ),
                io.Combo.Input(
                    "ranks_per_call",
                    options=list(RANKS_PER_CALL),
                    default="auto",
                    tooltip="auto = a call runs on as many ranks as make it fastest, and the others idle: a small picture over a "
                    "slow link may be fastest on one. all = every rank takes part in every call. Degrees that you set are obeyed. "
                    "Panel and report show the choice.",
                    advanced=True,
                    optional=True,
                ),
            ],
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
        """The same check before the prompt is queued, of the inputs that depend on the machine and on each other.

        It raises: ComfyUI repeats a text that is returned for each of these inputs, and the frontend then shows it in none of its
        toasts; an exception is shown once, in its own words.
        """
        given = {
            "world_size": world_size,
            "devices": devices,
            "ulysses_degree": ulysses_degree,
            "ring_degree": ring_degree,
            "batch_degree": batch_degree,
            "backend": backend,
            "shares": shares,
        }
        if None not in given.values():  # a linked input has no value yet
            cls.execute(**given)
        return True

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        return io.NodeOutput(RuntimeConfig.resolve(inventory=device_inventory(), **inputs))
