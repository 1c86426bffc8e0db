"""What ComfyUI's newer versions give to attention, and what they record: on the ComfyUI at hand, and on stand-ins for what only a
newer one has. Prints a JSON object."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [os.environ["COMFYUI_PATH"], str(Path(__file__).resolve().parents[1])]

import comfy.cli_args  # noqa: E402

args = comfy.cli_args.args
args.cpu = True
import torch  # noqa: E402
from comfy.ldm.modules import attention  # noqa: E402
from support.package import load_package  # noqa: E402

load_package()
import comfy.memory_management  # noqa: E402

from cp_runtime.comfy.attention.rank import attention_override  # noqa: E402
from cp_runtime.comfy.ranks.rank_service import make_service  # noqa: E402
from cp_runtime.comfyui import RECORDING, unrecorded  # noqa: E402


class StandIn:
    """`AttentionTensorContainer` of ComfyUI 0.32."""

    def __init__(self, tensor):
        self.tensor = tensor

    def take(self):
        tensor, self.tensor = self.tensor, None
        return tensor


Container = getattr(attention, "AttentionTensorContainer", StandIn)
qkv = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
given = []


def freeing(q, k, v, heads, **kwargs):
    """A function that takes containers, as ComfyUI's INT8 attention has one."""
    given.append([type(each).__name__ for each in (q, k, v)])
    return attention.attention_pytorch(q.take(), k.take(), v.take(), heads, **kwargs)


def chosen(*args, **kwargs):
    given.append("tensors")
    return attention.attention_pytorch(*args, **kwargs)


def attend(call, function):
    """What `optimized_attention` gives through our override, with q, k and v in containers and as they are."""
    given.clear()
    chosen.__dict__.update(container_function=function)
    override = attention_override(call, chosen)
    options = {"optimized_attention_override": override}
    expected = attention.optimized_attention(*qkv, 2, skip_reshape=True, transformer_options=options)
    containers = [Container(each) for each in qkv]
    if Container is StandIn:
        out = override.container_function(*containers, 2, skip_reshape=True, _inside_attn_wrapper=True)
    else:
        out = attention.optimized_attention(*containers, 2, skip_reshape=True, transformer_options=options)
    return {"equal": torch.equal(out, expected), "given": given[1:], "left": [each.tensor is not None for each in containers]}


class Shared:
    """A call whose attention is over the tokens of several ranks; here there is one."""

    attention_is_local = False

    def attend(self, q_BLHD, k_BLKD, v_BLKD, *, mask, scale, attend, kernel):
        return attend(*(t.transpose(1, 2) for t in (q_BLHD, k_BLKD, v_BLKD)), mask).transpose(1, 2)


def recorded():
    return {name: getattr(args, name, None) for name in RECORDING}


local = SimpleNamespace(attention_is_local=True)
found = {
    "containers": {"local": attend(local, freeing), "plain": attend(local, None), "shared": attend(Shared(), freeing)},
    "has containers": Container is not StandIn,
    "before": recorded(),
}
vars(args).update(dict.fromkeys(RECORDING, False))
with unrecorded(args):
    found["in a call"] = recorded()
found["after a call"] = recorded()
rank = SimpleNamespace(device=torch.device("cpu"), rank=0, loading_hook=lambda: None)
make_service(rank, {"model_folders": ()})
found["on a rank"] = recorded()
found["aimdo on a rank"] = comfy.memory_management.aimdo_enabled
print(json.dumps(found))
