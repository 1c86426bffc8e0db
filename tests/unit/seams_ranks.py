"""Rank script, one process: what ComfyUI's newer versions give to attention, and what they record: on the ComfyUI at hand, and on
stand-ins for what only a newer one has."""

from types import SimpleNamespace

import comfy.memory_management
import torch
from comfy.cli_args import args
from comfy.ldm.modules import attention
from support.ranks import finish, report, start

from cp_runtime.comfy.rank.attention import attention_override
from cp_runtime.comfy.rank.service import make_service
from cp_runtime.comfyui import RECORDING, unrecorded

start()


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
rank = SimpleNamespace(device=torch.device("cpu"), rank=0, spec={}, loading_hook=lambda: None)
make_service(rank)
found["on a rank"] = recorded()
found["aimdo on a rank"] = comfy.memory_management.aimdo_enabled
report(**found)
finish()
