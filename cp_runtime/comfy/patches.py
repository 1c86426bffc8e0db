"""Patches that other nodes put into the transformer (`transformer_options`), rebuilt on the workers.

A patch is a function inside a node's code, or an object of one of ComfyUI's classes. What travels is its name and the data that it
holds; a worker finds the same code under that name in its own ComfyUI and gives it that data. Only names in MIRRORED are looked
up. A patch sees what the forward of its rank sees: this rank's tokens. Where that is not what it expects, MIRRORED says how it is
adapted.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import comfy.ldm.common_dit
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import torch
from torch import Tensor, nn

from ..errors import MirrorError, UnsupportedError
from ..hooks import AppliedPlan
from ..plan import FamilyPlan
from ..pool.protocol import flatten
from .modules import decode_module, encode_module, find, full_name

KINDS = ("patches", "patches_replace")
OPTION = "cp_patches"  # entry of transformer_options that stands for both
_LOCALS = ".<locals>."

Prepare = Callable[[Any, Tensor], None]
Adapt = Callable[[Any, AppliedPlan[FamilyPlan]], Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """How a patch is mirrored.

    Args:
        node: id of the node that makes it, where its code does not tell.
        without: attributes that the workers do not need: None there.
        prepare: called in the UI process before every call, with the patch and the latent: encodes images, which takes a VAE.
        adapt: (patch, the model's plan) -> what the forward calls in its place.
        mixes_batch: it needs all items of a batch; no batch axis.
        unless: classes of transformers whose forward does not give it what it expects, once tokens are split.
    """

    node: str = ""
    without: tuple[str, ...] = ()
    prepare: Prepare | None = None
    adapt: Adapt | None = None
    mixes_batch: bool = False
    unless: tuple[str, ...] = ()


def _on_whole_tokens(stream: str, *names: str) -> Adapt:
    """Run the patch on the tokens of all ranks, on every rank: `names` are gathered, and what it returns is split again."""

    def adapt(patch: Any, applied: AppliedPlan[FamilyPlan]) -> Callable[..., Any]:
        def call(arguments: dict[str, Any]) -> Any:
            if stream not in applied.state.lengths:
                return patch(arguments)
            layout = applied.state.layout((stream,))
            out = patch({**arguments, **{n: applied.gather(arguments[n], stream, 1) for n in names}})
            if isinstance(out, Tensor):
                return layout.take_local(out, applied.state.rank, 1)
            return {k: layout.take_local(v, applied.state.rank, 1) if k in names else v for k, v in out.items()}

        return call

    return adapt


def _with_local_hint(patch: Any, applied: AppliedPlan[FamilyPlan]) -> Callable[..., Any]:
    """Add the hint of this rank's tokens to this rank's tokens."""

    def call(arguments: dict[str, Any]) -> Any:
        hint = patch.encoded_image
        start, stop = applied.state.layout(("img",)).window(applied.state.rank)
        local = copy.copy(patch)
        local.encoded_image = hint[:, start : min(stop, hint.shape[1])]
        return local(arguments)

    return call


def _with_local_embedding(patch: Any, applied: AppliedPlan[FamilyPlan]) -> Callable[..., Any]:
    """Show the patch this rank's part of what it embedded before the first block."""
    data = "model_patch_data"

    def localised(options: dict[str, Any]) -> dict[str, Any]:
        state = applied.state
        layout = state.layout(("video",))
        local = {k: state.once(data, v, lambda v=v: layout.take_local(v, state.rank, 1)) for k, v in options[data].items()}
        return {**options, data: local}

    def attention(*args: Any, extra_options: dict[str, Any], **kwargs: Any) -> Any:
        return patch(*args, extra_options=localised(extra_options), **kwargs)

    def mlp(arguments: dict[str, Any]) -> Any:
        return patch({**arguments, "transformer_options": localised(arguments["transformer_options"])})

    return attention if "extra_options" in inspect.signature(patch).parameters else mlp


def _encode_qwen_hint(patch: Any, x: Tensor) -> None:
    # The patch encodes its image inside the forward, once it knows the size. Here it does so around a network that adds nothing.
    alone, network = copy.copy(patch), patch.model_patch.model
    alone.model_patch = SimpleNamespace(
        model=SimpleNamespace(
            additional_in_dim=network.additional_in_dim,
            process_input_latent_image=network.process_input_latent_image,
            control_block=lambda img, *_: img,
        )
    )
    alone({"x": x, "img": x.new_zeros(1, 1, 1), "block_index": 0})
    patch.encoded_image, patch.encoded_image_size = alone.encoded_image, alone.encoded_image_size


def _encode_z_image_hint(patch: Any, x: Tensor) -> None:
    # Behind its last block the patch only encodes its image. The forward shows it whole image patches.
    x = comfy.ldm.common_dit.pad_to_patch_size(x, (2, 2))
    patch({"x": x, "img": x, "txt": x, "block_index": sys.maxsize})


def _encode_render(patch: Any, x: Tensor) -> None:
    x = comfy.ldm.common_dit.pad_to_patch_size(x, (1, 2, 2))
    patch.build_controlnet_input(x, x.dtype, x.shape[0])


_EXTRAS = "comfy_extras."
_MODEL_PATCH = _EXTRAS + "nodes_model_patch:"
_LLLITE = "comfy.ldm.anima.lllite:AnimaLLLite"
_MULTITALK = "comfy.ldm.wan.model_multitalk:MultiTalk"
_IMAGES = ("image", "inpaint_image", "mask", "render_video", "latent_format", "temp_data")

MIRRORED: Mapping[str, Patch] = {
    _EXTRAS + "nodes_slg:SkipLayerGuidanceDiT.execute.<locals>.skip": Patch(),
    _EXTRAS + "nodes_slg:SkipLayerGuidanceDiTSimple.execute.<locals>.skip": Patch(),
    _EXTRAS + "nodes_pag:PerturbedAttentionGuidance.execute.<locals>.perturbed_attention": Patch(),
    _EXTRAS + "nodes_freelunch:FreeU.execute.<locals>.output_block_patch": Patch(),
    _EXTRAS + "nodes_freelunch:FreeU_V2.execute.<locals>.output_block_patch": Patch(),
    _EXTRAS + "nodes_model_downscale:PatchModelAddDownscale.execute.<locals>.input_block_patch": Patch(),
    _EXTRAS + "nodes_model_downscale:PatchModelAddDownscale.execute.<locals>.output_block_patch": Patch(),
    # Krea 2 counts the image's tokens from the start of all tokens.
    _EXTRAS + "nodes_nag:NAGuidance.execute.<locals>.nag_attention_output_patch": Patch(
        mixes_batch=True, unless=("SingleStreamDiT",)
    ),
    _MODEL_PATCH + "UsoStyleProjectorPatch": Patch(node="USOStyleReference", mixes_batch=True),
    _MODEL_PATCH + "DiffSynthCnetPatch": Patch(
        node="QwenImageDiffsynthControlnet", without=_IMAGES, prepare=_encode_qwen_hint, adapt=_with_local_hint, mixes_batch=True
    ),
    # The forward cuts text from image between the blocks: Lumina's plan gathers what they return when this is there.
    _MODEL_PATCH + "ZImageControlPatch": Patch(
        node="ZImageFunControlnet",
        without=_IMAGES,
        prepare=_encode_z_image_hint,
        mixes_batch=True,
        unless=("NextDiTPixelSpace",),
    ),
    _MODEL_PATCH + "WanUni3CCnetPatch": Patch(
        node="WanUni3CControlnetApply",
        without=_IMAGES,
        prepare=_encode_render,
        adapt=_on_whole_tokens("video", "img"),
        mixes_batch=True,
    ),
    _LLLITE + "Patch": Patch(node="AnimaLLLiteApply", mixes_batch=True),
    _LLLITE + "AttentionPatch": Patch(node="AnimaLLLiteApply", adapt=_with_local_embedding, mixes_batch=True),
    _LLLITE + "MLPPatch": Patch(node="AnimaLLLiteApply", adapt=_with_local_embedding, mixes_batch=True),
    _MULTITALK + "CrossAttnPatch": Patch(
        node="WanInfiniteTalkToVideo", adapt=_on_whole_tokens("video", "x"), mixes_batch=True
    ),
    _MULTITALK + "GetAttnMapPatch": Patch(
        node="WanInfiniteTalkToVideo", adapt=_on_whole_tokens("video", "x", "q", "k"), mixes_batch=True
    ),
}  # fmt: skip

# Nodes whose patches cannot be mirrored, and why. `code`: name of what they put there, where it is no function of the node's own.
REFUSED: Mapping[str, str] = {
    "HyperTile": "draws random tiles inside the model",
    "TomePatchModel": "draws random tokens inside the model",
    "SelfAttentionGuidance": "reads attention scores out of the model",
    "FluxKVCache": "keeps keys and values of earlier steps inside the model",
    "SUPIRApply": "keeps state between the blocks of the model",
    "HypernetworkLoader": "puts networks into the attention of the model",
    "SDPoseKeypointExtractor": "reads features out of the model",
}
_MADE_BY = {
    "KV_Attn_Input": "FluxKVCache",
    "SUPIRPatch": "SUPIRApply",
    "load_hypernetwork_patch": "HypernetworkLoader",
}

_keys: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_checked: WeakSet[nn.Module] = WeakSet()
_numbers = itertools.count()
ATTACHED: dict[str, comfy.model_patcher.ModelPatcher] = {}
"""On a worker: networks of patches, by key."""


# --- in the UI process ---------------------------------------------------------------------------------------------------


def patches_obstacle(options: Mapping[str, Any], model: nn.Module) -> str | None:
    """Return what among the patches cannot be mirrored, or None."""
    for kind, name, _, patch in _entries(options):
        known = MIRRORED.get(_name_of(patch))
        where = f"{kind}: {name}"
        if known is None:
            node = node_of(patch)
            return (
                f"{_display(node)} patched the transformer ({where}) and {REFUSED.get(node, 'the workers do not have that code')}."
            )
        if type(model).__name__ in known.unless:
            node = _display(known.node or node_of(patch))
            return f"{node} ({where}) cannot be applied to a part of the tokens of {type(model).__name__}."
    try:
        encoded, networks = encode_patches(options)
        flatten(encoded, lambda tensor, path: None)
        for network in networks.values():
            if network not in _checked:
                flatten(encode_module(network), lambda tensor, path: None)
                _checked.add(network)
    except UnsupportedError as error:
        return f"a patch of the transformer holds something else than plain data: {error}."
    return None


def encode_patches(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, nn.Module]]:
    """Patches of `transformer_options` -> an entry in their place, plain data and tensors, and the networks in them, by key."""
    encoder = _Encoder()
    kinds: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for kind, name, place, patch in _entries(options):
        kinds[kind].append([name, place, encoder.index(patch)])
    if not encoder.entries:
        return {}, {}
    return {OPTION: {"entries": encoder.entries, **kinds}}, encoder.modules


def mixes_batch(arguments: Mapping[str, Any]) -> bool:
    """Whether a patch among the arguments of a call needs all items of the batch."""
    encoded = (arguments.get("transformer_options") or {}).get(OPTION, {"entries": []})
    return any(MIRRORED[entry["name"]].mixes_batch for entry in encoded["entries"])


def prepare_patches(options: Mapping[str, Any], x: Tensor) -> None:
    """Have patches encode their images for the size of the latent `x`."""
    for _, _, _, patch in _entries(options):
        prepare = MIRRORED[_name_of(patch)].prepare
        if prepare is not None:
            prepare(patch, x)


def node_of(patch: Any) -> str:
    """Id of the node that made a patch, or, where it cannot be told, the file that it is from."""
    module, _, path = _name_of(patch).partition(":")
    head = path.split(".")[0]
    if head in _MADE_BY and module.startswith("comfy"):
        return _MADE_BY[head]
    nodes = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    found = (name for name, cls in nodes.items() if cls.__qualname__ == head and full_name(cls) == f"{module}:{head}")
    pack = module.partition("custom_nodes")[2].strip("/.").replace(".", "/").split("/")[0]
    return next(found, f"a node of {pack or module}")


def _display(node: str) -> str:
    names = getattr(sys.modules.get("nodes"), "NODE_DISPLAY_NAME_MAPPINGS", {})
    return str(names.get(node) or node)


def _name_of(patch: Any) -> str:
    patch = getattr(patch, "__func__", patch)
    return full_name(patch if hasattr(patch, "__qualname__") else type(patch))


def _entries(options: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """(kind, name, place in it, patch) of every patch."""
    for name, patches in options.get("patches", {}).items():
        for patch in patches:
            yield "patches", name, None, patch
    for name, replaced in options.get("patches_replace", {}).items():
        for place, patch in replaced.items():
            yield "patches_replace", name, place, patch


class _Encoder:
    """Patches may share objects: each becomes one entry of a list."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.modules: dict[str, nn.Module] = {}
        self._seen: dict[int, int] = {}

    def index(self, patch: Any) -> int:
        if id(patch) not in self._seen:
            self._seen[id(patch)] = len(self.entries)
            self.entries.append({})
            self.entries[self._seen[id(patch)]] = self._entry(patch)
        return self._seen[id(patch)]

    def _entry(self, patch: Any) -> dict[str, Any]:
        name = _name_of(patch)
        if not isinstance(patch, FunctionType):
            without = MIRRORED[name].without
            return {"name": name, "data": {k: None if k in without else self._pack(v) for k, v in vars(patch).items()}}
        cells = zip(patch.__code__.co_freevars, patch.__closure__ or (), strict=True)
        data = {name: self._pack(cell.cell_contents) for name, cell in cells}
        return {"name": name, "data": data, "defaults": patch.__defaults__}

    def _pack(self, value: Any) -> Any:
        if isinstance(value, comfy.model_patcher.ModelPatcher):
            key = _keys.setdefault(value.model, f"m{next(_numbers)}")
            self.modules[key] = value.model
            return {"$module": key}
        if isinstance(value, comfy.sd.VAE):
            return {"$vae": value.spacial_compression_encode()}
        if full_name(type(value)) in MIRRORED:
            return {"$patch": self.index(value)}
        return value


# --- on a worker ---------------------------------------------------------------------------------------------------------


def attach(key: str, encoded: dict[str, Any], device: torch.device) -> None:
    """Keep a network for the patches to come."""
    module = decode_module(encoded)
    ATTACHED[key] = comfy.model_patcher.ModelPatcher(module, load_device=device, offload_device=torch.device("cpu"))


def decode_patches(encoded: dict[str, Any], applied: AppliedPlan[FamilyPlan]) -> dict[str, Any]:
    """The entries `patches` and `patches_replace` of transformer_options on this rank."""
    decoder = _Decoder(encoded["entries"])

    def patch(index: int) -> Callable[..., Any]:
        made, adapt = decoder.get(index), MIRRORED[encoded["entries"][index]["name"]].adapt
        return adapt(made, applied) if adapt and applied.mesh.size > 1 else made

    options: dict[str, Any] = {kind: {} for kind in KINDS}
    for name, _, index in encoded["patches"]:
        options["patches"].setdefault(name, []).append(patch(index))
    for name, place, index in encoded["patches_replace"]:
        options["patches_replace"].setdefault(name, {})[place] = patch(index)
    return options


class _Decoder:
    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self._entries = entries
        self._made: dict[int, Any] = {}

    def get(self, index: int) -> Any:
        if index not in self._made:
            entry = self._entries[index]
            if entry["name"] not in MIRRORED:
                raise MirrorError(f"{entry['name']} is not a patch that the workers know")
            make = self._function if _LOCALS in entry["name"] else self._object
            self._made[index] = make(entry)
        return self._made[index]

    def _object(self, entry: dict[str, Any]) -> Any:
        cls = find(entry["name"])
        patch = cls.__new__(cls)
        vars(patch).update({name: self._unpack(value) for name, value in entry["data"].items()})
        return patch

    def _function(self, entry: dict[str, Any]) -> FunctionType:
        outer, _, name = entry["name"].partition(_LOCALS)
        around = find(outer)
        around = inspect.unwrap(getattr(around, "__func__", around))
        codes = [c for c in around.__code__.co_consts if isinstance(c, CodeType) and c.co_name == name]
        if len(codes) != 1 or set(codes[0].co_freevars) != entry["data"].keys():
            raise MirrorError(f"{entry['name']} is another function in this ComfyUI than in the one that sent it")
        cells = tuple(CellType(self._unpack(entry["data"][variable])) for variable in codes[0].co_freevars)
        return FunctionType(codes[0], around.__globals__, name, entry["defaults"], cells)

    def _unpack(self, value: Any) -> Any:
        if isinstance(value, dict) and len(value) == 1:
            ((kind, body),) = value.items()
            if kind == "$module":
                return ATTACHED[body]
            if kind == "$vae":
                return SimpleNamespace(spacial_compression_encode=lambda: body)
            if kind == "$patch":
                return self.get(body)
        return value
