"""One node that attaches to a UNet what node packs do, in the shapes that the most installed ones have."""

from collections import Counter
from collections.abc import Callable
from enum import Enum
from functools import partial, wraps
from typing import Any

import numpy
import torch
from comfy.ldm.modules.attention import optimized_attention
from comfy.model_management import InterruptProcessingException
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import PatcherInjection, WrappersMP
from torch import Tensor, nn

from .conditioning import Random
from .node import kinds, node

KEY = "test_unlisted"
MIDDLE = "diffusion_model.middle_block.1"


def text_attention(model: ModelPatcher) -> list[tuple[Any, ...]]:
    """The places of attention to text, by block, number and index, and their modules."""
    transformer = model.model.diffusion_model
    found = []
    for name, blocks in (("input", transformer.input_blocks), ("output", transformer.output_blocks)):
        for number, block in enumerate(blocks):
            for part in block:
                each = getattr(part, "transformer_blocks", ())
                found += [(name, number, index, inner.attn2) for index, inner in enumerate(each)]
    return found


class PictureAttention:
    """Keys and values of a picture, for one half of CFG: an object with tensors that is called, as IPAdapter's."""

    def __init__(self, keys: Tensor, values: Tensor, weight: float) -> None:
        self.keys, self.values, self.weight = keys, values, weight

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extra_options: dict[str, Any]) -> Tensor:
        heads = extra_options["n_heads"]
        out = optimized_attention(q, k, v, heads)
        kinds = extra_options["cond_or_uncond"]
        each = q.shape[0] // len(kinds)
        for place, kind in enumerate(kinds):
            if kind == 0:
                own = q[place * each : (place + 1) * each]
                keys, values = (t.to(q).expand(each, -1, -1) for t in (self.keys, self.values))
                out[place * each : (place + 1) * each] += self.weight * optimized_attention(own, keys, values, heads)
        return out


def _picture(model: ModelPatcher) -> None:
    random = Random(5)
    for name, number, index, attention in text_attention(model):
        width = attention.to_q.out_features
        made = PictureAttention(random(1, 4, width), random(1, 4, width), 0.8)
        model.set_model_attn2_replace(made, name, number, index)


def _closures(model: ModelPatcher) -> None:
    scales: dict[str, Any] = {"q": 1.2, "v": torch.linspace(0.8, 1.2, 3)}

    def queries(q: Tensor, k: Tensor, v: Tensor, extra_options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        return q * scales["q"], k, v * scales["v"].mean()

    model.set_model_attn1_patch(queries)
    model.set_model_attn1_output_patch(lambda n, extra_options: n * 0.9)
    model.set_model_input_block_patch(lambda h, options: h * (1 + 0.01 * options["block"][1]))
    model.set_model_output_block_patch(lambda h, skip, options: (h, skip * 0.8))


def again(factor: float) -> Callable[[Any], Any]:
    """A pack's own decorator."""

    def decorate(function: Any) -> Any:
        @wraps(function)
        def decorated(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) * factor

        return decorated

    return decorate


def halved(h: Tensor, options: dict[str, Any]) -> Tensor:
    return h * 0.5


def _decorated(model: ModelPatcher) -> None:
    """A function in torch's decorator, one in the pack's, and one that has taken the name of a function of the module."""
    block = model.get_model_object(f"{MIDDLE}.forward")

    @torch.no_grad()
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return block(*args, **kwargs) * 0.8

    @again(0.9)
    @torch.inference_mode(False)
    def scaled(h: Tensor, options: dict[str, Any]) -> Tensor:
        return h * 1.3

    model.add_object_patch(f"{MIDDLE}.forward", forward)
    model.set_model_input_block_patch(scaled)
    model.set_model_input_block_patch(again(1.1)(halved))


class Steps:
    """Another strength at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, h: Tensor, options: dict[str, Any]) -> Tensor:
        self.calls += 1
        return h * (1 + 0.1 * self.calls)


def _state(model: ModelPatcher) -> None:
    model.set_model_input_block_patch(Steps())


def _cached(model: ModelPatcher) -> None:
    """Skips a block at every second call, as DeepCache does: it gives what it gave before."""
    kept: dict[str, Any] = {"calls": 0, "out": {}}
    block = model.get_model_object(f"{MIDDLE}.forward")

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kept["calls"] += 1
        if kept["calls"] % 2 or x.shape not in kept["out"]:
            kept["out"][x.shape] = block(x, *args, **kwargs)
        return kept["out"][x.shape]

    model.add_object_patch(f"{MIDDLE}.forward", forward)


class Scaled(nn.Module):
    """A layer of a pack around one of the model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) * 0.9


def _layer(model: ModelPatcher) -> None:
    model.add_object_patch("diffusion_model.out.2", Scaled(model.get_model_object("diffusion_model.out.2")))


def _wrapped(model: ModelPatcher) -> None:
    def around(executor: Any, x: Tensor, timesteps: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return executor(x, timesteps, *args, **kwargs) * 0.95

    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, around)
    model.set_model_input_block_patch(lambda h, options: h * 1.1)


class Strength:
    """A number that this process changes."""

    strength = 1.0


def _by_step(model: ModelPatcher) -> None:
    """This process sets an object's strength before every call."""
    made = Strength()

    def scaled(h: Tensor, options: dict[str, Any]) -> Tensor:
        return h * made.strength

    def call(apply_model: Any, args: dict[str, Any]) -> Any:
        made.strength *= 0.9
        return apply_model(args["input"], args["timestep"], **args["c"])

    model.set_model_input_block_patch(scaled)
    model.set_model_unet_function_wrapper(call)


def _mixes_halves(model: ModelPatcher) -> None:
    model.set_model_input_block_patch(lambda h, options: h + 0.3 * h.mean(0, keepdim=True))


def _needs_halves(model: ModelPatcher) -> None:
    def patch(h: Tensor, options: dict[str, Any]) -> Tensor:
        first, second = h.chunk(len(options["cond_or_uncond"]))
        return torch.cat([first, 0.9 * second + 0.1 * first])

    model.set_model_input_block_patch(patch)


def _random(model: ModelPatcher) -> None:
    model.set_model_input_block_patch(lambda h, options: h + 0.3 * torch.randn_like(h))


def _random_later(model: ModelPatcher) -> None:
    """From the second call on."""
    model.set_model_input_block_patch(lambda h, options: h + (0.3 * torch.randn_like(h) if options["sigmas"][0] < 10 else 0))


def _asks(model: ModelPatcher) -> None:
    """Asks the model for something that the ranks do not have, and goes on without it."""
    base = model.model
    model.set_model_input_block_patch(lambda h, options: h * (1 - 0.2 * getattr(base, "memory_usage_factor", 0)))


def _asks_for_the_class(model: ModelPatcher) -> None:
    model.set_model_input_block_patch(lambda h, options: h * (0.7 if isinstance(model, ModelPatcher) else 1))


def _noted_on_the_patcher(model: ModelPatcher) -> None:
    def patch(h: Tensor, options: dict[str, Any]) -> Tensor:
        model.test_calls = getattr(model, "test_calls", 0) + 1
        return h * (1 + 0.1 * model.test_calls)

    model.set_model_input_block_patch(patch)


def _random_of_numpy(model: ModelPatcher) -> None:
    """In a step whose call is not compared."""
    model.set_model_input_block_patch(lambda h, options: h * (0.9 + 0 * numpy.random.rand()) if step_of(options) == 2 else h)


def step_of(options: dict[str, Any]) -> int:
    return int((options["sample_sigmas"] - options["sigmas"][0]).abs().argmin())


class Mode(str, Enum):
    RUN = "run"
    SKIP = "skip"


def _enum(model: ModelPatcher) -> None:
    """Notes a text that is no plain one."""
    state = {"mode": Mode.RUN}

    def scale(h: Tensor, options: dict[str, Any]) -> Tensor:
        if options["block"] != ("input", 1):
            return h
        before, state["mode"] = state["mode"], Mode.RUN if state["mode"] is Mode.SKIP else Mode.SKIP
        return h * 0.9 if before is Mode.RUN else h * 0.5 if before is Mode.SKIP else h * 1.5

    model.set_model_input_block_patch(scale)


def _counter(model: ModelPatcher) -> None:
    calls: Counter[str] = Counter()

    def scale(h: Tensor, options: dict[str, Any]) -> Tensor:
        if options["block"] == ("input", 1):
            calls["blocks"] += 1
        return h * (1 - 0.1 * calls["blocks"])

    model.set_model_input_block_patch(scale)


class Fields(dict[str, Any]):
    """A dict whose items are attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def _another_dict(model: ModelPatcher) -> None:
    """Notes another object in every call, of a class that is a dict."""
    state = {"last": Fields(calls=0)}

    def scale(h: Tensor, options: dict[str, Any]) -> Tensor:
        if options["block"] == ("input", 1):
            state["last"] = Fields(calls=state["last"].calls + 1)
        return h * (1 - 0.1 * state["last"].calls)

    model.set_model_input_block_patch(scale)


def _noted_expanded(model: ModelPatcher) -> None:
    noted: dict[str, Tensor] = {}

    def note(h: Tensor, options: dict[str, Any]) -> Tensor:
        noted["mean"] = h.mean().tanh().reshape(1, 1).expand(3, 4)
        return h

    model.set_model_input_block_patch(note)
    model.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * (1 + noted["mean"].mean()))


class SaysItself:
    """Its class says what of it is sent: without what it keeps."""

    def __init__(self) -> None:
        self.calls = 0
        self.kept: dict[int, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.calls, self.kept = state["calls"], {}

    def __call__(self, h: Tensor, options: dict[str, Any]) -> Tensor:
        self.calls += 1
        self.kept[self.calls] = h.mean()
        return h * (1 - 0.01 * len(self.kept))


def _says_itself(model: ModelPatcher) -> None:
    model.set_model_input_block_patch(SaysItself())


class Proxy:
    """Has the attributes of what it stands for."""

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "inner", inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _proxy(model: ModelPatcher) -> None:
    settings = Proxy(Fields(scale=0.9))
    model.set_model_input_block_patch(lambda h, options: h * settings.scale)


def _written_options(model: ModelPatcher) -> None:
    """Writes something into the options that a wrapper in ComfyUI's process reads behind the call."""

    def wrapper(apply_model: Any, args: dict[str, Any]) -> Tensor:
        out: dict[str, Tensor] = {}
        args["c"]["transformer_options"]["test_out"] = out
        result: Tensor = apply_model(args["input"], args["timestep"], **args["c"])
        return result * (1 + (out["mean"].tanh() if "mean" in out else 0))

    def note(h: Tensor, options: dict[str, Any]) -> Tensor:
        if "test_out" in options:
            options["test_out"]["mean"] = h.mean()
        return h * 0.95

    model.set_model_input_block_patch(note)
    model.set_model_unet_function_wrapper(wrapper)


def _layers(model: ModelPatcher) -> None:
    """Runs the layers of a class in its own way."""
    model.set_model_patch((nn.Conv2d, lambda layer, x, *rest: layer(x) * 0.9), "forward_timestep_embed_patch")


def _interrupts(model: ModelPatcher) -> None:
    def interrupt(h: Tensor, options: dict[str, Any]) -> Tensor:
        raise InterruptProcessingException

    model.set_model_input_block_patch(interrupt)


def _partial(model: ModelPatcher) -> None:
    def fails(scale: float, h: Tensor, options: dict[str, Any]) -> Tensor:
        if torch.distributed.is_initialized():
            raise ValueError("this needs the main process")
        return h * scale

    model.set_model_input_block_patch(partial(fails, 0.9))


def _in_place(model: ModelPatcher) -> None:
    """Changes a tensor of its own, in every call."""
    buffer = torch.zeros(4)

    def patch(h: Tensor, options: dict[str, Any]) -> Tensor:
        if options["block"] == ("input", 1):
            buffer.add_(1)
        return h * (1 + 0.05 * float(buffer[0]))

    model.set_model_input_block_patch(patch)


def _noted(model: ModelPatcher) -> None:
    """Notes something in the transformer that a function in ComfyUI's process reads, as self-attention guidance does."""
    mean = None

    def note(h: Tensor, options: dict[str, Any]) -> Tensor:
        nonlocal mean
        mean = h.mean()
        return h

    def after(args: dict[str, Any]) -> Tensor:
        return args["denoised"] if mean is None else args["denoised"] + mean.tanh()

    model.set_model_input_block_patch(note)
    model.set_model_sampler_post_cfg_function(after)


def _noted_in_a_dict(model: ModelPatcher) -> None:
    notes: dict[str, Tensor] = {}

    def note(h: Tensor, options: dict[str, Any]) -> Tensor:
        notes["mean"] = h.mean()
        return h

    def after(args: dict[str, Any]) -> Tensor:
        return args["denoised"] + notes.get("mean", torch.zeros(())).tanh()

    model.set_model_input_block_patch(note)
    model.set_model_sampler_post_cfg_function(after)


def _noted_later(model: ModelPatcher) -> None:
    notes: dict[str, Any] = {"calls": [0]}

    def note(h: Tensor, options: dict[str, Any]) -> Tensor:
        if options["sigmas"][0] < 10:
            notes["mean"] = h.mean()
        return h * 0.9

    model.set_model_input_block_patch(note)


LAST: Any = None


class Shelf:
    """Where a patch notes something."""

    mean: Any = None


def _in_a_global(model: ModelPatcher) -> None:
    def note(h: Tensor, options: dict[str, Any]) -> Tensor:
        global LAST
        LAST = h.mean()
        return h * 0.9

    model.set_model_input_block_patch(note)


def _on_a_class(model: ModelPatcher) -> None:
    def note(h: Tensor, options: dict[str, Any]) -> Tensor:
        Shelf.mean = h.mean()
        return h * 0.9

    model.set_model_input_block_patch(note)


def _late(model: ModelPatcher) -> None:
    """Mixes halves, from some step on."""
    model.set_model_input_block_patch(lambda h, options: h + (0.3 * h.mean(0, keepdim=True) if options["sigmas"][0] < 2 else 0))


def _uuids(model: ModelPatcher) -> None:
    model.set_model_input_block_patch(lambda h, options: h * (1 + 0.1 * len(options.get("uuids") or ())))


SETTINGS = {"strength": 1.0}


def _own_model(model: ModelPatcher) -> None:
    """Holds the patcher of the model, its sampling, and the model itself."""
    base, sampling = model.model, model.get_model_object("model_sampling")

    def scaled(h: Tensor, options: dict[str, Any]) -> Tensor:
        sigma = options["sigmas"][0].cpu()
        first, second, third = (float(each.sigma_max) for each in (sampling, base.model_sampling, model.model.model_sampling))
        assert first == second == third == float(model.get_model_object("model_sampling").sigma_max)
        return h * (1 + 0.3 * model.model.model_sampling.timestep(sigma).abs().sqrt() / 30).to(h)

    model.set_model_input_block_patch(scaled)


def _settings(model: ModelPatcher) -> None:
    """Reads what the node has set in its module."""
    SETTINGS["strength"] = 0.7
    model.set_model_input_block_patch(lambda h, options: h * SETTINGS["strength"])


def scaled_forward(transformer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Another forward of a UNet: its time embedding runs twice."""
    transformer.time_embed(torch.zeros(1, transformer.time_embed[0].in_features).to(x))
    return type(transformer)._forward(transformer, x, *args, **kwargs) * 0.9


def _outer_forward(model: ModelPatcher) -> None:
    model.add_object_patch("diffusion_model.forward", partial(scaled_forward, model.model.diffusion_model))


def _inner_forward(model: ModelPatcher) -> None:
    stock = model.get_model_object("diffusion_model._forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs) * 0.9

    model.add_object_patch("diffusion_model._forward", forward)


def _injected(model: ModelPatcher) -> None:
    """Injects a layer behind a block, and another forward."""
    kept: list[Any] = []

    def inject(patcher: Any) -> None:
        transformer = patcher.model.diffusion_model
        stock = transformer.middle_block[1].forward
        kept.append(transformer.input_blocks[1])
        transformer.input_blocks[1] = type(kept[0])(*kept[0], Halved())
        transformer.middle_block[1].forward = lambda *args, **kwargs: stock(*args, **kwargs) * 0.7

    def eject(patcher: Any) -> None:
        transformer = patcher.model.diffusion_model
        transformer.input_blocks[1] = kept.pop()
        del transformer.middle_block[1].forward

    model.set_injections(KEY, [PatcherInjection(inject, eject)])


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


def _block(model: ModelPatcher) -> None:
    """Leaves a part of a block out: whoever calls the block calls its parts."""
    block = model.get_model_object("diffusion_model.middle_block")
    model.add_object_patch("diffusion_model.middle_block", type(block)(block[0], block[2]))


KINDS = kinds(globals(), ModelPatcher)


@node("MODEL", again=True, model="MODEL", kind=list(KINDS))
def TestUnlisted(model: Any, kind: str) -> Any:
    """Attach something new to a clone of a UNet that no table of the ranks lists."""
    patched = model.clone()
    KINDS[kind](patched)
    return patched


UNDO: list[Callable[[], None]] = []


def _method(block: Any) -> Callable[[], None]:
    stock = block.forward
    block.forward = lambda *args, **kwargs: stock(*args, **kwargs) * 0.7
    return lambda: delattr(block, "forward")


def _hook(block: Any) -> Callable[[], None]:
    return block.register_forward_hook(lambda module, args, out: out * 0.7).remove


FOR_GOOD = {"method": _method, "hook": _hook}


@node("MODEL", again=True, model="MODEL", kind=list(FOR_GOOD))
def TestUnlistedForGood(model: Any, kind: str) -> Any:
    """Replace a method of one block, or hook into it, until `TestUnlistedUndone`."""
    UNDO.append(FOR_GOOD[kind](model.get_model_object(MIDDLE)))
    return model


@node("MODEL", again=True, model="MODEL")
def TestUnlistedUndone(model: Any) -> Any:
    """Undo `TestUnlistedForGood`."""
    while UNDO:
        UNDO.pop()()
    return model
