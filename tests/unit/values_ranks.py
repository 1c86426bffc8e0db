"""Rank script, one process: a model by value over its life, where its weights are, and what a rank makes of it."""

import os

import folder_paths
import torch
from comfy.model_patcher import ModelPatcher
from safetensors.torch import save_file
from support.ranks import finish, report, start
from torch import nn

_, _, (folder,) = start()
from cp_runtime import map_weights  # noqa: E402
from cp_runtime.comfy.rank.files import Buffer, Memory  # noqa: E402
from cp_runtime.comfy.rank.objects import read_model  # noqa: E402
from cp_runtime.comfy.shared.values import packed  # noqa: E402
from cp_runtime.comfy.ui.names import in_folder  # noqa: E402
from cp_runtime.comfy.ui.values import value_of  # noqa: E402
from cp_runtime.errors import MirrorError  # noqa: E402
from cp_runtime.system import system  # noqa: E402

CPU = torch.device("cpu")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.tied, self.norm = nn.Linear(700, 500), nn.Linear(700, 500, bias=False), nn.LayerNorm(500)
        self.tied.weight = self.first.weight
        self.wide = nn.Parameter(torch.randn(64, 96).T)  # not contiguous
        self.none = nn.Parameter(torch.empty(0, 5))
        self.register_buffer("table", torch.arange(40_000.0))
        self.scale = 3.0


def patcher():
    torch.manual_seed(0)
    return ModelPatcher(Network().eval(), CPU, CPU)


def looked(patched, **settings):
    return value_of(patched.model).of(patched, **settings)


def places(value):
    """The numbers of blocks that the weights are in."""
    return sorted({place.block for place in value.places})


def rank_of(value):
    """What a rank reads. Its pages are its own."""
    blocks = [Buffer(system.private_pages(block.fd), block.is_file) for block in value.blocks]
    return read_model(packed(value.data, value.places), Memory(blocks, {}), CPU).network


def same(network, model):
    ours, theirs = model.state_dict(), network.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def inside(tensor, value):
    return any(place.offset <= 1 << 40 for place in value.places) and tensor.untyped_storage().nbytes() > tensor.nbytes


one = patcher()
before = {name: weight.clone() for name, weight in one.model.state_dict().items()}
value = looked(one)
network = rank_of(value)
report(
    step="private weights",
    blocks=[block.is_file for block in value.blocks],
    moved=inside(one.model.first.weight, value),
    kept=all(torch.equal(weight, before[name]) for name, weight in one.model.state_dict().items()),
    same=same(network, one.model),
    tied=network.tied.weight.data_ptr() == network.first.weight.data_ptr(),
    stride=network.wide.stride() == one.model.wide.stride(),
    again=looked(one) is value,
    training=network.training,
)
with torch.no_grad():
    network.norm.weight.fill_(7)
report(step="a rank writes", alone=bool((one.model.norm.weight == 1).all()))


def changed(name, change, **settings):
    """Whether a change gives another value, and the rank the change."""
    patched = patcher()
    known = looked(patched)
    change(patched.model)
    now = looked(patched, **settings)
    report(step=name, change=True, new=now.key != known.key, same=same(rank_of(now), patched.model), scale=rank_of(now).scale)


def write(model):
    with torch.no_grad():
        model.first.weight[3, 3] += 1


changed("an attribute", lambda model: setattr(model, "scale", 4.0))
changed("a weight in place", write, thorough=False)
changed("by way of data", lambda model: model.first.bias.data.add_(1))
changed("another weight", lambda model: setattr(model.norm, "weight", nn.Parameter(torch.rand(500))), thorough=False)
changed("another dtype", lambda model: model.norm.half(), thorough=False)
changed("none", lambda model: setattr(model.norm, "bias", None), thorough=False)
changed("a buffer", lambda model: setattr(model, "table", torch.zeros(40_000)))

patched = patcher()
known = looked(patched)
for module in patched.model.modules():  # as after some time on a device
    for name, weight in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad))
patched.model.tied.weight = patched.model.first.weight
report(
    step="elsewhere and back",
    same_value=looked(patched).key == known.key,
    blocks=len(known.blocks),
    moved=inside(patched.model.first.weight, known),
)
original, other = patched.model.first.weight, nn.Parameter(torch.rand(500, 700))
patched.model.first.weight = patched.model.tied.weight = other
replaced = rank_of(looked(patched)).first.weight
patched.model.first.weight = patched.model.tied.weight = original
report(
    step="replaced and put back",
    replaced=torch.equal(replaced, other),
    intact=torch.equal(original, before["first.weight"]),
    back=same(rank_of(looked(patched)), patched.model),
)
patched.patches = {"norm.weight": [(1.0, ("diff", (torch.ones(500),)), 1.0, None, None)]}
patched.patch_weight_to_device("norm.weight")
report(
    step="patched here", rank_has=float(rank_of(looked(patched)).norm.weight.mean()), here=float(patched.model.norm.weight.mean())
)

mapped = patcher()
save_file({name: weight.contiguous().clone() for name, weight in mapped.model.state_dict().items()}, f"{folder}/model.safetensors")
map_weights(mapped.model, f"{folder}/model.safetensors")
of_file = looked(mapped)
pointer = mapped.model.first.weight.data_ptr()
report(
    step="a file's pages",
    blocks=[block.is_file for block in of_file.blocks],
    moved=mapped.model.first.weight.data_ptr() != pointer,
    same=same(rank_of(of_file), mapped.model),
)
written = patcher()
map_weights(written.model, f"{folder}/model.safetensors")
written.model.first.weight.data[0, 0] = 9.0
value = looked(written)
report(step="written pages", blocks=[block.is_file for block in value.blocks], same=same(rank_of(value), written.model))

# ComfyUI's folder of models may be a link; the kernel names files of mapped pages by their real path.
os.symlink(folder, f"{folder}/linked")
folder_paths.add_model_folder_path("cp_test", f"{folder}/linked")
report(step="a folder that is a link", found=in_folder(os.path.realpath(f"{folder}/model.safetensors")))

for name, odd in {
    "hook": lambda model: model.norm.register_forward_hook(lambda *_: None),
    "method": lambda model: setattr(model.norm, "forward", lambda x: x),
    "object": lambda model: setattr(model, "lock", __import__("threading").Lock()),
    "dropout": lambda model: setattr(model, "drop", nn.Dropout(0.5)),
}.items():
    patched = patcher()
    odd(patched.model)
    try:
        looked(patched)
        words = ""
    except MirrorError as error:
        words = str(error)
    report(step=f"refused, {name}", words=words)
finish()
