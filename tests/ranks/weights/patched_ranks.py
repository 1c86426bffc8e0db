"""Rank script: every form of weight patch against ComfyUI's own ModelPatcher. Rank 0 reports.

Each runs in two of the placements, by turns, and in the soak in all of them.

A form is tried on every weight of a model that can take it at once: also on those that ComfyUI leaves as they are, such as the
modulation of Wan's blocks, which are parameters of modules with modules inside.

Arguments: folder of checkpoints, and as JSON for every model its file, that of another one to be merged with it, and the forms.
"""

import json
import os
import threading
import types
import zlib

import comfy.sd
import comfy.utils
import torch
import torch.distributed as dist
from comfy import model_management as mm
from comfy import weight_adapter as adapters
from mirrors import call, flux_inputs, load, mirrors_on
from support.faults import SOAK
from support.ranks import answer, finish, report, start

from cp_runtime.comfy.shared.patches import applied_patches
from cp_runtime.comfy.ui.weight_patches import written_patches
from cp_runtime.engine.ranks.config import PipelineSettings
from cp_runtime.engine.ranks.mesh import BatchMesh
from cp_runtime.errors import MirrorError

rank, world, (folder, names) = start()
mesh = BatchMesh(dist.group.WORLD)
STAGED = PipelineSettings(stages=world, patches=1)
PLACEMENTS = ("whole", "sharded", "offloaded", "staged")
INPUTS = ("img_in.weight", "patch_embedding.weight")
RANK = 4


def drawn(name, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def changed(name, weight):
    """A change of a weight, as large as its own numbers."""
    return drawn(name, *weight.shape) * max(weight.float().std().item(), 0.05)


def low_rank(adapter):
    def patch(name, weight):
        if weight.ndim != 2:
            return None
        (rows, columns), scale = weight.shape, weight.float().std().item()
        up, down = drawn(name + "up", rows, RANK), drawn(name + "down", RANK, columns)
        part, other = scale * drawn(name + "a", rows // 4, 4), drawn(name + "b", 4, columns // 4)
        dora = 0.5 + drawn(name + "dora", rows, 1).abs()
        blocks = 0.2 * drawn(name + "blocks", 4, rows // 4, rows // 4)
        return {
            "lora": lambda: adapters.LoRAAdapter(set(), (scale * up, down, 2.0, None, None, None)),
            "dora": lambda: adapters.LoRAAdapter(set(), (scale * up, down, 2.0, None, dora, None)),
            "loha": lambda: adapters.LoHaAdapter(set(), (scale * up, down, 2.0, up, down, None, None, None)),
            "lokr": lambda: adapters.LoKrAdapter(set(), (drawn(name, 4, 4), part @ other, 2.0, None, None, None, None, None, None)),
            "glora": lambda: adapters.GLoRAAdapter(
                set(), (0.1 * drawn(name + "a", columns, RANK), 0.1 * drawn(name + "b", RANK, columns), scale * up, down, 2.0, None)
            ),
            "oft": lambda: adapters.OFTAdapter(set(), (blocks, None, 0.5, None)),
            "boft": lambda: adapters.BOFTAdapter(set(), (blocks[None], None, 0.5, None)),
        }[adapter]()

    return patch


def of_first_rows(name, weight):
    return ("diff", (changed(name, weight)[: len(weight) // 2],))


def wider(weight):
    return [weight.shape[0], 2 * weight.shape[1], *weight.shape[2:]]


def widened_by_lora(name, weight):
    shape = wider(weight)
    up, down = 0.2 * drawn(name, shape[0], RANK), drawn(name + "down", RANK, torch.Size(shape[1:]).numel())
    return adapters.LoRAAdapter(set(), (up, down, None, None, None, shape))


def only(names, patch):
    return lambda name, weight: patch(name, weight) if name.endswith(names) else None


class OfAPack(adapters.LoRAAdapter):
    """A kind of patch that no ComfyUI knows, of a node pack."""

    def calculate_weight(self, weight, *args, **kwargs):
        return weight * self.weights[0]


def shared_out(weight):
    return weight.flip(0) / shared_out.by


shared_out.by = 2


def with_class(scale, change=False):
    """A patch of a class that is made here, and may be changed afterwards."""

    class Local(adapters.LoRAAdapter):
        factor = 2.0

        def calculate_weight(self, weight, *args, **kwargs):
            return weight * self.weights[0] * self.factor

        @classmethod
        def scaled(cls, weight):
            return cls.factor * weight

    if change:
        Local.factor = scale
    return Local(set(), (scale,))


def with_argument(scale):
    class Local(adapters.LoRAAdapter):
        factor = scale

        def calculate_weight(self, weight, *args, **kwargs):
            return weight * self.factor

    return Local(set(), ())


def inner(factor):
    def deeper():
        def function(weight):
            return weight * factor * function.sign

        function.sign = -1
        return function

    return deeper()


FORMS = {
    "diff": lambda name, weight: ("diff", (changed(name, weight),)),
    "set": lambda name, weight: ("set", (weight.float() + changed(name, weight),)),
    "weights outside of .weight and .bias": lambda name, weight: (
        None if name.endswith((".weight", ".bias")) else ("diff", (changed(name, weight),))
    ),
    "biases": only(".bias", lambda name, weight: ("diff", (changed(name, weight),))),
    "an adapter of a pack": lambda name, weight: OfAPack(set(), (1.5 + drawn(name, *weight.shape[:1], *(1,) * (weight.ndim - 1)),)),
    "a class of a function": lambda name, weight: with_class(0.75),
    **{adapter: low_rank(adapter) for adapter in ("lora", "dora", "loha", "lokr", "glora", "oft", "boft")},
    "a wider input, padded": only(INPUTS, lambda name, weight: ("diff", (0.2 * drawn(name, *wider(weight)), {"pad_weight": True}))),
    "a wider input by LoRA": only(INPUTS, widened_by_lora),
}
ROWS, SWAPPED = "of the first rows", "with a function"
OWN = {
    "with a function of a pack": shared_out,
    "with a function in functions": inner(0.5),
    "with a class method": type(with_class(1.0)).scaled,
}


def patched(patcher, form):
    """A clone with the form on every weight that takes it."""
    clone, patches = patcher.clone(), {}
    for name, weight in patcher.model.named_parameters():
        if form == ROWS:
            key, patch = (name, (0, 0, len(weight) // 2)), of_first_rows(name, weight) if weight.ndim == 2 else None
        elif form == SWAPPED:
            key, patch = (name, None, comfy.utils.swap_scale_shift), ("diff", (changed(name, weight),))
            patch = patch if weight.ndim == 2 and not len(weight) % 2 else None
        elif form in OWN:
            key, patch = (name, None, OWN[form]), ("diff", (changed(name, weight),))
        else:
            key, patch = name, FORMS[form](name, weight)
        if patch is not None:
            patches[key] = patch
    clone.add_patches(patches, 0.7)
    return clone


def merged(one, other, own=0.6, others=0.4):
    """As ModelMergeSimple, ModelAdd and ModelSubtract merge."""
    clone = one.clone()
    clone.add_patches(other.get_key_patches("diffusion_model."), others, own)
    return clone


def with_form(one, other, form):
    """A clone of `one` with the form; of a merge, with `other`."""
    if form == "none":
        return one.clone()
    if form == "merge":
        return merged(one, other)
    if form == "difference":
        return merged(one, other, 1.0, -0.5)
    if form == "merge of LoRAs":
        return merged(patched(one, "lora"), patched(other, "lora"))
    if form == "LoRA on a merge of merges":
        inner = merged(other, merged(other, patched(other, "lora")))
        return patched(merged(patched(one, "lora"), inner), "lora")
    return patched(one, form)


def inputs_of(model):
    """Arguments of the forward that fit the input layer as it is now."""
    dtype, weight = torch.float32, model.img_in.weight if hasattr(model, "img_in") else model.patch_embedding.weight
    if hasattr(model, "img_in"):
        return {**flux_inputs(dtype), "x": drawn("x", 1, weight.shape[1] // 4, 6, 10).to(dtype)}
    shapes = {"x": (1, weight.shape[1], 3, 6, 10), "context": (1, 11, 64)}
    return {name: drawn(name, *shape) for name, shape in shapes.items()} | {"timestep": torch.tensor([500.0])}


def refusal(patch, function=None):
    return str(answer(MirrorError, written_patches, {"a.weight": [(1.0, patch, 1.0, None, function)]}))


gone = types.FunctionType((lambda weight: weight).__code__, {"__name__": "a_pack"}, "gone")
torch.set_grad_enabled(False)
odd = [
    OfAPack(set(), (threading.Lock(),)),
    with_class(0.5, change=True),
    with_argument(0.5),
    OfAPack(set(), (object(),)),
    OfAPack(set(), (torch.quantize_per_tensor(torch.ones(9), 0.1, 0, torch.qint8),)),
]
report(model="", form="refused", said=[refusal(("diff", ()), gone), *map(refusal, odd)])
for own, others, forms in json.loads(names):
    paths = [os.path.join(folder, f"{name}.safetensors") for name in (own, others)]
    stock, other = (comfy.sd.load_diffusion_model(path, disable_dynamic=True) for path in paths)
    mirrors = {placement: mirrors_on("cpu") for placement in PLACEMENTS}
    plain = None
    for number, form in enumerate(forms):
        patcher = with_form(stock, other, form)
        mm.load_models_gpu([patcher])
        arguments = inputs_of(patcher.model.diffusion_model)
        expected = patcher.model.diffusion_model(**arguments)
        plain = expected if plain is None else plain
        patcher.detach()
        mm.current_loaded_models.clear()
        off = {}
        for turn in range(len(PLACEMENTS) if SOAK else 2):
            placement = PLACEMENTS[(number + turn) % len(PLACEMENTS)]
            own_mirrors = mirrors[placement]
            staged = placement == "staged"
            more = {"stages": world} if staged else {"device_bytes": 1 << 20}
            load(own_mirrors, paths[0], patches=applied_patches(patcher), uuid=form, mesh=mesh, placement=placement, **more)
            ulysses, pipeline = (1, STAGED) if staged else (world, None)
            out = call(own_mirrors, mesh, ulysses, pipeline=pipeline, arguments=arguments)
            off[placement] = ((out.float() - expected.float()).abs().max() / expected.float().std()).item()
        report(
            model=own,
            form=form,
            off=off,
            std=expected.float().std().item(),
            matters=((expected - plain).abs().max() / plain.std()).item(),
            weights=len(patcher.patches),
            left_out=len(patcher.patches) - len(applied_patches(patcher)),
        )
finish()
