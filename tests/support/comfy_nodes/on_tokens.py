"""One node that attaches to a transformer what node packs do, in the shapes that the most installed ones have."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from comfy.ldm.modules.attention import optimized_attention
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import PatcherInjection
from torch import Tensor

from .conditioning import Random
from .node import kinds, node


def blocks_of(model: ModelPatcher) -> str:
    """The path of the blocks."""
    transformer = model.model.diffusion_model
    return next(name for name in ("double_blocks", "transformer_blocks", "blocks", "layers") if hasattr(transformer, name))


def _attention_output(model: ModelPatcher) -> None:
    """Weighs tokens by where they are: wrong on a part of them."""

    def weighed(attn: Tensor, extra_options: dict[str, Any]) -> Tensor:
        return attn * torch.linspace(0.8, 1.2, attn.shape[1]).to(attn)[:, None]

    model.set_model_attn1_output_patch(weighed)


class Mean:
    """Adds the mean of all tokens behind a block: an object, for all blocks."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, args: dict[str, Any]) -> dict[str, Any]:
        img = args["img"]
        return {**args, "img": img + self.weight * img.mean(1, keepdim=True)}


def _mean(model: ModelPatcher) -> None:
    model.set_model_patch(Mean(0.5), "double_block")


def _replaced_block(model: ModelPatcher) -> None:
    """Runs a block, and turns its tokens around."""

    def replace(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        out = extra["original_block"](args)
        return {**out, "img": out["img"] + 0.2 * out["img"].flip(1)}

    for number in range(2):
        model.set_model_patch_replace(replace, "dit", "double_block", number)


def _cached_block(model: ModelPatcher) -> None:
    """Skips a block at every second call, as block caches do: it adds what it added before."""
    kept: dict[str, Any] = {"calls": 0}

    def replace(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        kept["calls"] += 1
        if kept["calls"] % 2:
            out = extra["original_block"](args)
            kept["added"] = out["img"] - args["img"]
            return out
        return {**args, "img": args["img"] + kept["added"]}

    model.set_model_patch_replace(replace, "dit", "double_block", 1)


def _decides_by_tokens(model: ModelPatcher) -> None:
    """Skips a block where its tokens have changed little since the last call, as First Block Cache does."""
    kept: dict[str, Any] = {}

    def replace(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        last = kept.get("img")
        kept["img"] = args["img"].clone()
        if last is not None and (last - args["img"]).abs().mean() < 0.5 * args["img"].abs().mean():
            return {**args, "img": args["img"] * 1.01}
        return extra["original_block"](args)

    model.set_model_patch_replace(replace, "dit", "double_block", 1)


def _forward(model: ModelPatcher) -> None:
    """Another forward of a block, around its own."""
    path = f"diffusion_model.{blocks_of(model)}.1.forward"
    stock = model.get_model_object(path)

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = stock(*args, **kwargs)
        if isinstance(out, tuple):
            return tuple(tokens + 0.2 * tokens.flip(1) for tokens in out)
        return out + 0.2 * out.flip(1)

    model.add_object_patch(path, forward)


def _own_options(model: ModelPatcher) -> None:
    """Gives a block a patch of its attention, in a step whose call is not compared: it would weigh a rank's tokens."""

    def weighed(attn: Tensor, options: dict[str, Any]) -> Tensor:
        return attn * torch.linspace(0.2, 1.8, attn.shape[1]).to(attn)[:, None]

    def replace(args: dict[str, Any], extra: dict[str, Any]) -> Any:
        options = dict(args["transformer_options"])
        if int((options["sample_sigmas"] - options["sigmas"][0]).abs().argmin()) == 2:
            options["patches"] = {**options.get("patches", {}), "attn1_output_patch": [weighed]}
        return extra["original_block"]({**args, "transformer_options": options})

    model.set_model_patch_replace(replace, "dit", "double_block", 0)


def _method(model: ModelPatcher) -> None:
    """Other methods of the transformer, before its blocks and behind them."""
    encode, unpatchify = (model.get_model_object(f"diffusion_model.{name}") for name in ("rope_encode", "unpatchify"))

    def longer(*args: Any, **kwargs: Any) -> Tensor:
        return encode(*args, **kwargs) * 0.9

    def turned(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return unpatchify(x + 0.2 * x.flip(1), *args, **kwargs)

    model.add_object_patch("diffusion_model.rope_encode", longer)
    model.add_object_patch("diffusion_model.unpatchify", turned)
    model.add_object_patch("diffusion_model.of_no_transformer", longer)


def _outer_forward(model: ModelPatcher) -> None:
    """The transformer's forward around its innermost one, and that too."""
    transformer = model.model.diffusion_model
    stock = model.get_model_object("diffusion_model._forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = stock(*args, **kwargs)
        return out + 0.2 * out.flip(-1)

    model.add_object_patch("diffusion_model._forward", forward)
    model.add_object_patch("diffusion_model.forward_orig", partial(computing, transformer))


def computing(transformer: Any, x: Tensor, t: Tensor, *args: Any, **kwargs: Any) -> Any:
    transformer.time_embedding(torch.zeros(1, transformer.freq_dim).to(x))
    return type(transformer).forward_orig(transformer, x * 0.9, t, *args, **kwargs)


def _injected(model: ModelPatcher) -> None:
    """Injects another forward into an attention's first layer and, in its place, another layer: both look at all tokens."""
    before: dict[Any, Any] = {}

    def inject(patcher: Any) -> None:
        layers = [each for each in _block(patcher).modules() if type(each).__name__ == "Linear"]
        stock = before[layers[0]] = layers[0].forward
        layers[0].forward = lambda x: stock(x) + 0.2 * stock(x.flip(1))
        owner = next(each for each in _block(patcher).modules() if layers[-1] in each.children())
        name = next(name for name, each in owner.named_children() if each is layers[-1])
        before[owner] = name, layers[-1]
        setattr(owner, name, Turned(layers[-1]))

    def eject(patcher: Any) -> None:
        for module, own in before.items():
            if isinstance(own, tuple):
                setattr(module, *own)
            else:
                module.forward = own
        before.clear()

    def _block(patcher: Any) -> Any:
        return getattr(patcher.model.diffusion_model, name)[1]

    name = blocks_of(model)
    model.set_injections("test_injected", [PatcherInjection(inject, eject)])


def _injects(change: Callable[[Any], Callable[..., None]]) -> Callable[[ModelPatcher], None]:
    """A kind that injects what is refused. `change`: of a transformer; returns the undo."""

    def attach(model: ModelPatcher) -> None:
        undo: list[Any] = []

        def inject(patcher: Any) -> None:
            undo.append(change(patcher.model.diffusion_model))

        def eject(patcher: Any) -> None:
            undo.pop()()

        model.set_injections("test_injected", [PatcherInjection(inject, eject)])

    return attach


def another_forward(transformer: Any) -> Callable[..., None]:
    stock = transformer.forward
    transformer.forward = lambda *args, **kwargs: stock(*args, **kwargs) * 0.9
    return partial(setattr, transformer, "forward", stock)


def other_weights(transformer: Any) -> Callable[..., None]:
    layer = transformer.blocks[0].ffn[0]
    weight, layer.weight = layer.weight, torch.nn.Parameter(layer.weight * 0.9)
    return partial(setattr, layer, "weight", weight)


def other_modules(transformer: Any) -> Callable[..., None]:
    block = transformer.blocks[0]
    ffn, block.ffn = block.ffn, torch.nn.Sequential(*block.ffn, torch.nn.Tanh())
    return partial(setattr, block, "ffn", ffn)


def hook(transformer: Any) -> Callable[..., None]:
    remove: Callable[..., None] = transformer.register_forward_hook(lambda module, args, output: output * 0.9).remove
    return remove


def another_class(transformer: Any) -> Callable[..., None]:
    block = transformer.blocks[0]
    own, block.__class__ = type(block), type("Sub", (type(block),), {})
    return partial(setattr, block, "__class__", own)


def _injected_count(model: ModelPatcher) -> None:
    """Another effect with every load of the model."""
    count = {"loads": 0}

    def inject(patcher: Any) -> None:
        count["loads"] += 1
        layer = patcher.model.diffusion_model.blocks[0].ffn
        stock, scale = layer.forward, 0.7 ** count["loads"]
        layer.forward = lambda x: stock(x) * scale

    def eject(patcher: Any) -> None:
        del patcher.model.diffusion_model.blocks[0].ffn.forward

    model.set_injections("test_injected", [PatcherInjection(inject, eject)])


def _injected_with_a_wrapper(model: ModelPatcher) -> None:
    """A function in ComfyUI's process looks for what was injected."""
    _injected(model)
    model.set_model_unet_function_wrapper(lambda apply_model, args: apply_model(args["input"], args["timestep"], **args["c"]))


def _injected_raises(model: ModelPatcher) -> None:
    def inject(patcher: Any) -> None:
        if torch.distributed.is_initialized():
            raise ValueError("this needs the main process")

    def eject(patcher: Any) -> None:
        pass

    model.set_injections("test_injected", [PatcherInjection(inject, eject)])


_injected_class = _injects(another_class)
_injected_forward, _injected_weights, _injected_modules, _injected_hook = map(
    _injects, (another_forward, other_weights, other_modules, hook)
)


class Turned(torch.nn.Module):
    """A layer around another one, that turns tokens around."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layers = [layer]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers[0](x)
        return out + 0.2 * out.flip(1)


class PictureAttention:
    """Adds attention to a picture's keys and values behind a block, with a module of its own, as PuLID does for Flux."""

    def __init__(self, width: int) -> None:
        random = Random(3)
        self.keys, self.values = random(1, 5, width), random(1, 5, width)
        self.norm = torch.nn.BatchNorm1d(width, affine=False).eval()

    def __call__(self, args: dict[str, Any]) -> dict[str, Any]:
        img = args["img"]
        keys, values = (t.to(img).expand(img.shape[0], -1, -1) for t in (self.keys, self.values))
        query = self.norm.to(img.device)(torch.nn.functional.layer_norm(img, (img.shape[-1],)).transpose(1, 2)).transpose(1, 2)
        return {**args, "img": img + 0.3 * optimized_attention(query, keys, values, 2)}


def _picture(model: ModelPatcher) -> None:
    blocks = getattr(model.model.diffusion_model, blocks_of(model))
    width = next(module.in_features for module in blocks[0].modules() if isinstance(module, torch.nn.Linear))
    model.set_model_patch(PictureAttention(width), "double_block")


def _queries(model: ModelPatcher) -> None:
    def patch(first: Any, *args: Any, **kwargs: Any) -> Any:
        # Flux calls it with q, k and v, `[B, heads, tokens, D]`, and takes a dict; Wan calls it with one dict and takes a tensor.
        if isinstance(first, dict):
            return first["x"] * torch.linspace(0.9, 1.1, first["x"].shape[1]).to(first["x"])[:, None]
        return {"q": first * torch.linspace(0.9, 1.1, first.shape[2]).to(first)[:, None]}

    model.set_model_attn1_patch(patch)


def _image_only(model: ModelPatcher) -> None:
    """Changes the image's tokens alone, by the counts that the options give."""

    def weighed(attn: Tensor, extra_options: dict[str, Any]) -> Tensor:
        first, last = extra_options["img_slice"]
        out = attn.clone()
        out[:, first:last] *= 0.7
        return out

    model.set_model_attn1_output_patch(weighed)


def _by_rank(model: ModelPatcher) -> None:
    """Counts tokens by what the transformer's first layer made of them: only one process can be right."""

    def patch(args: dict[str, Any]) -> dict[str, Any]:
        return {**args, "img": args["img"] * (1 + torch.distributed.get_rank() if torch.distributed.is_initialized() else 1)}

    model.set_model_patch(patch, "double_block")


def _noted_on_the_model(model: ModelPatcher) -> None:
    """Counts calls on the transformer, and does more with every one."""
    transformer = model.model.diffusion_model

    def patch(args: dict[str, Any]) -> dict[str, Any]:
        transformer.test_calls = getattr(transformer, "test_calls", 0) + 1
        return {**args, "img": args["img"] * (1 + 0.05 * transformer.test_calls)}

    model.set_model_patch(patch, "double_block")


def _read_off_the_model(model: ModelPatcher) -> None:
    """A function in ComfyUI's process does something with what is noted there."""
    transformer = model.model.diffusion_model

    def patch(args: dict[str, Any]) -> dict[str, Any]:
        transformer.test_mean = args["img"].mean()
        return args

    def after(args: dict[str, Any]) -> Tensor:
        return args["denoised"] * (1 + getattr(transformer, "test_mean", torch.zeros(())).tanh())

    model.set_model_patch(patch, "double_block")
    model.set_model_sampler_post_cfg_function(after)


def _written_options(model: ModelPatcher) -> None:
    """One patch writes something into the options for another one."""

    def write(attn: Tensor, extra_options: dict[str, Any]) -> Tensor:
        extra_options["test_mean"] = attn.mean()
        return attn

    def read(attn: Tensor, extra_options: dict[str, Any]) -> Tensor:
        return attn * (1 + extra_options["test_mean"].tanh())

    model.set_model_attn1_output_patch(write)
    model.set_model_attn1_output_patch(read)


def _fewer_blocks(model: ModelPatcher) -> None:
    blocks = model.get_model_object(f"diffusion_model.{blocks_of(model)}")
    model.add_object_patch(f"diffusion_model.{blocks_of(model)}", torch.nn.ModuleList(list(blocks)[:1]))


def _runs_on_rank_0(model: ModelPatcher) -> None:
    """Decides by what no other rank has, as a clock would."""

    def replace(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        ranks = torch.distributed
        return extra["original_block"](args) if not ranks.is_initialized() or ranks.get_rank() == 0 else args

    model.set_model_patch_replace(replace, "dit", "double_block", 1)


def _raises_on_rank_1(model: ModelPatcher) -> None:
    def patch(args: dict[str, Any]) -> dict[str, Any]:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise ValueError("this needs the first process")
        return {**args, "img": args["img"] * 0.9}

    model.set_model_patch(patch, "double_block")


def _raises(model: ModelPatcher) -> None:
    def patch(args: dict[str, Any]) -> dict[str, Any]:
        if torch.distributed.is_initialized():
            raise ValueError("this needs the main process")
        return {**args, "img": args["img"] * 0.9}

    model.set_model_patch(patch, "double_block")


KINDS = kinds(globals(), ModelPatcher)


@node("MODEL", again=True, model="MODEL", kind=list(KINDS))
def TestOnTokens(model: Any, kind: str) -> Any:
    """Attach something new to a clone of a transformer that no table of the ranks lists."""
    patched = model.clone()
    KINDS[kind](patched)
    return patched
