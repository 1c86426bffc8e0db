"""Rank script, one process: every tiny model by value, as ComfyUI's process writes it and a rank reads it.

It reports whether the copy computes the same bits, and whether a call leaves what is written as it was.
"""

import torch
from family_stock import forward
from support import families
from support.models import build
from support.ranks import finish, report, start

from cp_runtime.comfy.rank.objects import read
from cp_runtime.comfy.shared.objects import Settings, write
from cp_runtime.nested import tensors

start()
CPU = torch.device("cpu")
STABLE = Settings(later=False)


def copy_of(model):
    written = write(model)
    return read(written.data, [tensor.clone() for tensor in written.tensors], CPU)


def names(classes):
    """Some are made anew on every rank."""
    return sorted(map(str, classes))


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.contiguous().view(-1).view(torch.uint8)


def equal(ones, others):
    pairs = zip(map(bits, tensors(ones)), map(bits, tensors(others)), strict=True)
    return all(one[:2] == other[:2] and torch.equal(one[2], other[2]) for one, other in pairs)


for family in families.NAMES:
    loaded = families.load(family)
    for name, spec in loaded.MODELS.items():
        model, case = build(spec), next((case for case in loaded.CASES if case.model == name), None)
        read_back, before = copy_of(model), write(model, STABLE)
        found = {"classes": names(read_back.classes) == names(before.classes)}
        if case is not None:
            inputs = case.make()
            with torch.inference_mode():
                out, again = (forward(each, inputs, case.options) for each in (model, read_back.thing))
            found["equal"] = equal(out, again)
            found["called"] = min(tensor.float().std().item() for tensor in tensors(out)) > 0
        after = write(model, STABLE)
        found["unchanged"] = after.data == before.data and equal(after.tensors, before.tensors)
        report(name=f"{family}, {name}", **found)
finish()
