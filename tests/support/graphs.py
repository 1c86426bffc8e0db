"""Prompts in ComfyUI's API format, from a checkpoint file to a saved latent.

`flux_prompt` and `wan_prompt` build the same graph with different conditioning. Without `cp` it is a stock graph; with
`cp` the model goes through Apply Context Parallel, so that both differ in nothing else. Node ids are words: `loader`,
`model_0` and on (LoRA and patches), `cp_config`, `cp_apply`, `positive`, `negative`, `latent`, `sampler`, `save`, and
for the CP Sampler `report`.

Sizes are in pixels, eight to a latent pixel; frames are latent frames.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor

from .families import Served, checkpoint_of

Prompt = dict[str, dict[str, Any]]
Link = list[Any]
SamplerNode = Literal["KSampler", "KSamplerAdvanced", "SamplerCustomAdvanced", "CPSampler"]
NodeSpec = tuple[str, Mapping[str, Any]]
"""Class and inputs of a node."""

MODEL = object()
"""Stands in a node's inputs for the model, where that does not go into an input `model`."""

CP_CONFIG_DEFAULTS: dict[str, Any] = {
    "world_size": 0,
    "devices": "",
    "ulysses_degree": 0,
    "ring_degree": 0,
    "batch_degree": 0,
    "rotate_method": "alltoall",
    "convert_to_fp32": True,
    "ulysses_anything": True,
    "ring_anything": True,
    "backend": "auto",
    "on_unsupported": "error",
    "step_timeout": 600.0,
    "weights": "auto",
    "memory_per_rank": 0.0,
    "shares": "",
    "ranks_per_call": "all",  # not the node's default: tiny models are fastest on one rank, and tests are about several
}

PIXELS = 8
"""Side of a latent pixel, in pixels."""

_nonces = itertools.count(1)


class Graph:
    """A prompt under construction."""

    def __init__(self) -> None:
        self.prompt: Prompt = {}

    def add(self, node_id: str, class_type: str, **inputs: Any) -> Link:
        """Add a node and return a link to its first output."""
        if node_id in self.prompt:
            raise ValueError(f"node_id: got {node_id!r}, which is there already; allowed: a new one")
        self.prompt[node_id] = {"class_type": class_type, "inputs": inputs}
        return [node_id, 0]


def cp_config(**overrides: Any) -> dict[str, Any]:
    """Inputs of a CP Config node: those of CP_CONFIG_DEFAULTS, and `overrides`."""
    unknown = set(overrides) - set(CP_CONFIG_DEFAULTS)
    if unknown:
        raise ValueError(f"cp: got {sorted(unknown)}; allowed: {', '.join(CP_CONFIG_DEFAULTS)}")
    return CP_CONFIG_DEFAULTS | overrides


def flux_prompt(
    *,
    ckpt: str = "flux",
    width: int = 64,
    height: int = 64,
    tokens: int = 12,
    guidance: float = 3.5,
    attention_mask: str = "none",
    reference: Mapping[str, Any] | None = None,
    control: Mapping[str, Any] | None = None,
    batch: int = 1,
    latent: Mapping[str, Any] | None = None,
    conditioning: Mapping[str, Any] | None = None,
    **common: Any,
) -> Prompt:
    """A Flux graph.

    Args:
        guidance: the guidance input; -1 for none (models without guidance embedding, such as schnell).
        attention_mask: see TestConditioning.
        reference: size of a reference image in pixels, `{"width": 32, "height": 48}`, and `reference_count` of TestConditioning.
        control: inputs of TestControl, `{}` for its defaults.
        latent: more inputs of TestLatent, e.g. `{"noise": 1.0, "noise_mask": "left"}`.
        conditioning: more inputs of both TestConditioning nodes.
        common: see `sampling_prompt`.
    """
    inputs: dict[str, Any] = {"tokens": tokens, "width": 64, "pooled_width": 64, "guidance": guidance}
    inputs |= {"attention_mask": attention_mask, **_reference(reference), **(conditioning or {})}
    size = {"batch": batch, "channels": 16, "frames": 0, "height": height // PIXELS, "width": width // PIXELS}
    return sampling_prompt(ckpt=ckpt, latent={**size, **(latent or {})}, conditioning=inputs, control=control, **common)


def wan_prompt(
    *,
    ckpt: str = "wan_t2v",
    width: int = 64,
    height: int = 64,
    frames: int = 3,
    tokens: int = 16,
    clip_vision: bool = False,
    concat_latent: bool = False,
    reference: Mapping[str, Any] | None = None,
    batch: int = 1,
    channels: int = 16,
    latent: Mapping[str, Any] | None = None,
    conditioning: Mapping[str, Any] | None = None,
    **common: Any,
) -> Prompt:
    """A Wan graph.

    Args:
        clip_vision: give the 257 CLIP vision tokens that `wan_i2v` attends to.
        concat_latent: give a first image, as latent channels beside the noise (`wan_i2v`, `wan22_i2v`).
        channels: latent channels: 16, for `wan22_5b` 48.
        latent: more inputs of TestLatent; `{"noise_mask": "first_frame"}` makes `wan22_5b` use per-frame timesteps.

    The others are those of `flux_prompt`.
    """
    inputs: dict[str, Any] = {"tokens": tokens, "width": 64, "clip_vision": clip_vision, "concat_latent": concat_latent}
    inputs |= {**_reference(reference), **(conditioning or {})}
    size = {"batch": batch, "channels": channels, "frames": frames, "height": height // PIXELS, "width": width // PIXELS}
    return sampling_prompt(ckpt=ckpt, latent={**size, **(latent or {})}, conditioning=inputs, **common)


def sampling_prompt(
    *,
    ckpt: str,
    latent: Mapping[str, Any],
    conditioning: Mapping[str, Any],
    cp: Mapping[str, Any] | None = None,
    pipefusion: Mapping[str, Any] | None = None,
    node: SamplerNode = "KSampler",
    sampler: str = "euler",
    scheduler: str = "simple",
    steps: int = 2,
    cfg: float = 1.0,
    seed: int = 1,
    denoise: float = 1.0,
    negative: Mapping[str, Any] | None = None,
    control: Mapping[str, Any] | None = None,
    loras: Iterable[str | tuple[str, float]] = (),
    apply_after_lora: bool = True,
    model_nodes: Sequence[NodeSpec] = (),
    after_apply: Sequence[NodeSpec] = (),
    sampler_has_config: bool = False,
    low_ckpt: str | None = None,
    weight_dtype: str = "default",
    nonce: int | None = None,
    others: Mapping[str, NodeSpec] | None = None,
) -> Prompt:
    """A graph for any family.

    Args:
        ckpt: file name in `diffusion_models`; `.safetensors` may be left out.
        latent: inputs of TestLatent.
        conditioning: inputs of both TestConditioning nodes.
        cp: inputs of CP Config that differ from their defaults; None leaves context parallelism out.
        pipefusion: inputs of CP PipeFusion, behind CP Config.
        node: the sampler node. CPSampler needs `cp`; without it KSampler takes its place, so that one call gives both
            graphs.
        negative: inputs of the negative TestConditioning that differ from the positive ones, besides its seed.
        control: inputs of TestControl, attached to the positive conditioning; Flux only.
        loras: file names in `loras`, each alone or with its strength, in the order they are applied.
        apply_after_lora: whether Apply Context Parallel stands behind the LoRA loaders or before them.
        model_nodes: nodes before Apply Context Parallel and behind the LoRA loaders there, e.g.
            `("TestPatch", {"kind": …})`.
        after_apply: nodes between Apply Context Parallel (or its place) and the sampler.
        sampler_has_config: give the configuration to the CP Sampler itself, without Apply Context Parallel.
        low_ckpt: a second model that takes over after half of the steps, as Wan 2.2's low-noise model does;
            KSamplerAdvanced.
        others: more nodes, by id, for links of the nodes above.
        nonce: changes nothing but ComfyUI's cache key: two prompts that differ in it alone are both sampled. By default
            every prompt gets a new one. With a fixed one, a repeated prompt comes out of ComfyUI's cache.
    """
    if sampler_has_config and (node != "CPSampler" or cp is None):
        raise ValueError("sampler_has_config: got True; allowed: with node='CPSampler' and a cp")
    if low_ckpt is not None and node != "KSamplerAdvanced":
        raise ValueError(f"node: got {node!r} with low_ckpt; allowed: 'KSamplerAdvanced'")
    if node == "CPSampler" and cp is None:
        node = "KSampler"
    graph = Graph()
    config = None if cp is None else graph.add("cp_config", "CPConfig", **cp_config(**cp))
    if pipefusion is not None:
        config = graph.add("pipefusion", "CPPipeFusion", cp_config=config, **pipefusion)
    lora_nodes = _lora_nodes(loras)
    before = [*(lora_nodes if apply_after_lora else []), *model_nodes]
    after = [*([] if apply_after_lora else lora_nodes), *after_apply]

    def load(file: str, suffix: str = "") -> Link:
        loader = graph.add(f"loader{suffix}", "UNETLoader", unet_name=_file(file), weight_dtype=weight_dtype)
        return _model_chain(graph, loader, suffix, before, None if sampler_has_config else config, after)

    stages = {"sampler": load(ckpt), **({} if low_ckpt is None else {"sampler_low": load(low_ckpt, "_low")})}
    empty = graph.add("latent", "TestLatent", **latent)
    inputs = {**conditioning, "nonce": next(_nonces) if nonce is None else nonce, "latent": empty}
    positive = graph.add("positive", "TestConditioning", **{"seed": 100, **inputs})
    if control is not None:
        positive = graph.add("control", "TestControl", **_CONTROL_DEFAULTS | dict(control), conditioning=positive)
    opposite = graph.add("negative", "TestConditioning", **{**inputs, "seed": 200, **(negative or {})})
    guided = {"cfg": cfg, "positive": positive, "negative": opposite}
    settings = {"seed": seed, "latent_image": empty, "sampler_name": sampler, "scheduler": scheduler, "steps": steps}
    out = _sampler(graph, node, stages, guided, denoise, settings, config if sampler_has_config else None)
    graph.add("save", "SaveLatent", samples=out, filename_prefix="test")
    for node_id, (class_type, node_inputs) in (others or {}).items():
        graph.add(node_id, class_type, **node_inputs)
    return graph.prompt


def _model_chain(
    graph: Graph, model: Link, suffix: str, before: Sequence[NodeSpec], config: Link | None, after: Sequence[NodeSpec]
) -> Link:
    """What a sampler gets: the model behind nodes, Apply Context Parallel where there is a configuration for it, and more nodes."""
    names = itertools.count()
    for class_type, inputs in before:
        model = graph.add(f"model_{next(names)}{suffix}", class_type, **_with_model(inputs, model))
    if config is not None:
        model = graph.add(f"cp_apply{suffix}", "ApplyContextParallel", model=model, cp_config=config)
    for class_type, inputs in after:
        model = graph.add(f"model_{next(names)}{suffix}", class_type, **_with_model(inputs, model))
    return model


def _sampler(
    graph: Graph,
    node: SamplerNode,
    stages: Mapping[str, Link],
    guided: Mapping[str, Any],
    denoise: float,
    settings: Mapping[str, Any],
    config: Link | None,
) -> Link:
    """The sampler node, with what it needs of others; a KSamplerAdvanced for each of the models, by id."""
    if node == "KSamplerAdvanced":
        return _advanced(graph, stages, **guided, **settings)
    (model,) = stages.values()
    if node == "SamplerCustomAdvanced":
        return _custom(graph, model, guided, denoise, **settings)
    own = {} if config is None else {"cp_config": config}
    out = graph.add("sampler", node, model=model, denoise=denoise, **guided, **settings, **own)
    if node == "CPSampler":
        graph.add("report", "PreviewAny", source=["sampler", 1])
    return out


def _advanced(graph: Graph, stages: Mapping[str, Link], latent_image: Link, seed: int, steps: int, **common: Any) -> Link:
    """KSamplerAdvanced with one model for all steps, or another one from half of them on."""
    names = list(stages)
    for name, model in stages.items():
        first, last = name == names[0], name == names[-1]
        latent_image = graph.add(
            name,
            "KSamplerAdvanced",
            model=model,
            latent_image=latent_image,
            add_noise="enable" if first else "disable",
            noise_seed=seed,
            steps=steps,
            start_at_step=0 if first else steps // 2,
            end_at_step=10000 if last else steps // 2,
            return_with_leftover_noise="disable" if last else "enable",
            **common,
        )
    return latent_image


def _custom(
    graph: Graph,
    model: Link,
    guided: Mapping[str, Any],
    denoise: float,
    latent_image: Link,
    seed: int,
    sampler_name: str,
    **schedule: Any,
) -> Link:
    """SamplerCustomAdvanced with the guider that the CFG scale needs."""
    if guided["cfg"] == 1.0:
        guider = graph.add("guider", "BasicGuider", model=model, conditioning=guided["positive"])
    else:
        guider = graph.add("guider", "CFGGuider", model=model, **guided)
    noise = graph.add("noise", "RandomNoise", noise_seed=seed)
    select = graph.add("sampler_select", "KSamplerSelect", sampler_name=sampler_name)
    sigmas = graph.add("sigmas", "BasicScheduler", model=model, denoise=denoise, **schedule)
    inputs = {"noise": noise, "guider": guider, "sampler": select, "sigmas": sigmas, "latent_image": latent_image}
    return graph.add("sampler", "SamplerCustomAdvanced", **inputs)


GUIDED_FLUX = partial(flux_prompt, steps=3, cfg=4.0)


def family_prompt(served: Served, **common: Any) -> Prompt:
    """The graph of a family's tiny model: a stock graph, or the same with `cp`. See `sampling_prompt` for `common`.

    A nested latent is saved tensor by tensor, by the nodes `save_0`, `save_1` and so on in place of `save`.
    """
    nested = isinstance(served.latent, list)
    shapes = served.latent if nested else [served.latent]
    common = {"cfg": served.cfg, "batch": served.batch, **common}
    # Not empty, so that ComfyUI leaves its channels as they are.
    latent = {"batch": common.pop("batch"), "shapes": json.dumps(shapes), "noise": 1.0}
    extra = json.dumps({name: _extra(value) for name, value in served.cond.items()})
    conditioning = {"tokens": served.tokens, "width": served.width, "extra": extra}
    prompt = sampling_prompt(ckpt=checkpoint_of(served), latent=latent, conditioning=conditioning, **common)
    if nested:
        samples = prompt.pop("save")["inputs"]["samples"]
        for index in range(len(shapes)):
            part = {"class_type": "TestLatentPart", "inputs": {"samples": samples, "index": index}}
            save = {"class_type": "SaveLatent", "inputs": {"samples": [f"part_{index}", 0], "filename_prefix": "test"}}
            prompt |= {f"part_{index}": part, f"save_{index}": save}
    return prompt


def renamed(prompt: Prompt, prefix: str) -> Prompt:
    """The same graph with other ids, to be queued together with another one."""

    def input_of(value: Any) -> Any:
        return [prefix + value[0], value[1]] if isinstance(value, list) else value

    inputs = {id: {name: input_of(value) for name, value in node["inputs"].items()} for id, node in prompt.items()}
    return {f"{prefix}{id}": {**node, "inputs": inputs[id]} for id, node in prompt.items()}


def _extra(value: Any) -> Any:
    """A value in `Served.cond` as TestConditioning reads it."""
    if isinstance(value, Tensor):
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"shape": value}
    if isinstance(value, list):
        return [_extra(item) for item in value]
    if isinstance(value, dict):
        return {"dict": {name: _extra(item) for name, item in value.items()}}
    return value


_CONTROL_DEFAULTS = {"seed": 0, "hidden": 256, "blocks": 2, "strength": 0.5}


def _with_model(inputs: Mapping[str, Any], model: Link) -> dict[str, Any]:
    if any(value is MODEL for value in inputs.values()):
        return {name: model if value is MODEL else value for name, value in inputs.items()}
    return {"model": model, **inputs}


def _file(name: str) -> str:
    return name if name.endswith(".safetensors") else f"{name}.safetensors"


def _lora_nodes(loras: Iterable[str | tuple[str, float]]) -> list[NodeSpec]:
    pairs = [(lora, 1.0) if isinstance(lora, str) else lora for lora in loras]
    return [("LoraLoaderModelOnly", {"lora_name": _file(name), "strength_model": strength}) for name, strength in pairs]


def _reference(reference: Mapping[str, Any] | None) -> dict[str, Any]:
    """Inputs of TestConditioning for a reference given in pixels."""
    if reference is None:
        return {}
    rest = {name: value for name, value in reference.items() if name not in ("width", "height")}
    return {"reference_width": reference["width"] // PIXELS, "reference_height": reference["height"] // PIXELS, **rest}
