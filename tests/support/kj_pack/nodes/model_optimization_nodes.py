"""Forwards of modules of Wan, as object patches: guidance away from a text, scaling by attention between frames, chunks."""

import types
from typing import Any

import torch
from comfy.ldm.modules import attention
from torch import nn

REPLACED = "diffusion_model.blocks.{}.{}.forward"


class _Bound:
    """What the pack's patches have in common: a module's forward is a closure over one of them, and nothing else."""

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class WanCrossAttentionPatch(_Bound):
    def __init__(
        self, context: Any, nag_scale: float, nag_alpha: float, nag_tau: float, i2v: bool, input_type: str, inplace: bool
    ) -> None:
        self.nag_context = context
        self.nag_scale, self.nag_alpha, self.nag_tau = nag_scale, nag_alpha, nag_tau
        self.i2v, self.input_type, self.inplace = i2v, input_type, inplace

    def __get__(self, module: Any, owner: Any = None) -> Any:
        def wrapped_attention(module: Any, *args: Any, **kwargs: Any) -> Any:
            return self.forward(module, *args, **kwargs)

        return types.MethodType(wrapped_attention, module)

    def forward(self, module: Any, x: Any, context: Any, context_img_len: Any = None, transformer_options: Any = None) -> Any:
        def attend(tokens: Any, text: Any) -> Any:
            q, k, v = module.norm_q(module.q(tokens)), module.norm_k(module.k(text)), module.v(text)
            return attention.optimized_attention(q, k, v, heads=module.num_heads, transformer_options=transformer_options)

        picture = 0.0
        if self.i2v:
            seen, context = context[:, :context_img_len], context[:, context_img_len:]
            q, k, v = module.norm_q(module.q(x)), module.norm_k_img(module.k_img(seen)), module.v_img(seen)
            picture = attention.optimized_attention(q, k, v, heads=module.num_heads, transformer_options=transformer_options)
        away = self.nag_context
        if self.input_type == "batch" and not self.i2v:
            away = away.repeat(len(x), 1, 1)
        guided = len(x) if self.input_type == "batch" or len(context) == 1 else (len(x) + 1) // 2
        toward, negative = attend(x[:guided], context[:guided]), attend(x[:guided], away)
        further = self.nag_scale * toward - (self.nag_scale - 1) * negative
        length, reached = (t.abs().sum(-1, keepdim=True) for t in (toward, further))
        further = torch.where(reached / length > self.nag_tau, further * (length * self.nag_tau / (reached + 1e-7)), further)
        out = self.nag_alpha * further + (1 - self.nag_alpha) * toward
        if guided < len(x):
            out = torch.cat([out, attend(x[guided:], context[guided:])])
        return module.o(out + picture)


class WanVideoNAG:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        scale = ("FLOAT", {"default": 1.0})
        return {
            "required": {
                "model": ("MODEL",), "conditioning": ("CONDITIONING",), "nag_scale": scale, "nag_alpha": scale, "nag_tau": scale,
                "input_type": (["default", "batch"],), "inplace": ("BOOLEAN", {"default": False}),
            }
        }  # fmt: skip

    def patch(self, model: Any, conditioning: Any, input_type: str, **settings: Any) -> Any:
        patched, transformer = model.clone(), model.get_model_object("diffusion_model")
        dtype = transformer.text_embedding[0].weight.dtype
        context = transformer.text_embedding(conditioning[0][0].to(dtype)).detach()
        i2v = "WAN21_I2V" in type(model.model.model_config).__name__
        for number, block in enumerate(transformer.blocks):
            made = WanCrossAttentionPatch(context, i2v=i2v, input_type=input_type, **settings)
            patched.add_object_patch(REPLACED.format(number, "cross_attn"), made.__get__(block.cross_attn))
        return (patched,)


class WanAttentionPatch(_Bound):
    def __init__(self, num_frames: int, weight: float) -> None:
        self.num_frames, self.enhance_weight = num_frames, weight

    def __get__(self, module: Any, owner: Any = None) -> Any:
        def wrapped_attention(module: Any, *args: Any, **kwargs: Any) -> Any:
            module.num_frames, module.enhance_weight = self.num_frames, self.enhance_weight
            return enhanced(module, *args, **kwargs)

        return types.MethodType(wrapped_attention, module)


def enhanced(module: Any, x: Any, freqs: Any, transformer_options: Any = None) -> Any:
    """Attend without options, as some versions of the pack do."""
    shape = (*x.shape[:2], module.num_heads, module.head_dim)
    q, k = (_rotated(norm(projection(x)).view(shape), freqs)
            for norm, projection in ((module.norm_q, module.q), (module.norm_k, module.k)))  # fmt: skip
    factor = get_feta_scores(q, k, module.num_frames, module.enhance_weight)
    return module.o(attention.optimized_attention(q.flatten(2), k.flatten(2), module.v(x), heads=module.num_heads)) * factor


def _rotated(x: Any, freqs: Any) -> Any:
    pairs = x.to(freqs.dtype).reshape(*x.shape[:-1], -1, 1, 2)
    return (freqs[..., 0] * pairs[..., 0] + freqs[..., 1] * pairs[..., 1]).reshape(x.shape).type_as(x)


def get_feta_scores(query: Any, key: Any, num_frames: int, enhance_weight: float) -> Any:
    of_place = [t.unflatten(1, (num_frames, -1)).permute(0, 2, 3, 1, 4).flatten(0, 2) for t in (query, key)]
    shares = torch.softmax((of_place[0] @ of_place[1].mT).float() * query.shape[-1] ** -0.5, -1)
    others = shares[:, ~torch.eye(num_frames, dtype=torch.bool)]
    return (others.mean() * (num_frames + enhance_weight)).clamp(min=1)


class WanVideoEnhanceAVideoKJ:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "enhance", "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "latent": ("LATENT",), "weight": ("FLOAT", {"default": 2.0})}}

    def enhance(self, model: Any, latent: Any, weight: float) -> Any:
        patched = model.clone()
        for number, block in enumerate(model.get_model_object("diffusion_model").blocks):
            made = WanAttentionPatch(latent["samples"].shape[2], weight)
            patched.add_object_patch(REPLACED.format(number, "self_attn"), made.__get__(block.self_attn))
        return (patched,)


class WanffnChunkPatch(_Bound):
    def __init__(self, num_chunks: int, dim_threshold: int) -> None:
        self.num_chunks, self.dim_threshold = num_chunks, dim_threshold

    def __get__(self, module: Any, owner: Any = None) -> Any:
        def wrapped_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            return self.forward(module, *args, **kwargs)

        return types.MethodType(wrapped_forward, module)

    def forward(self, module: Any, x: Any) -> Any:
        parts = x.chunk(self.num_chunks, 1) if x.shape[1] > self.dim_threshold else [x]
        return torch.cat([nn.Sequential.forward(module, part) for part in parts], 1)


class WanChunkFeedForward:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "execute", "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "chunks": ("INT", {"default": 2}), "dim_threshold": ("INT", {"default": 8})}}

    def execute(self, model: Any, chunks: int, dim_threshold: int) -> Any:
        patched = model.clone()
        for number, block in enumerate(model.get_model_object("diffusion_model").blocks):
            made = WanffnChunkPatch(chunks, dim_threshold)
            patched.add_object_patch(REPLACED.format(number, "ffn"), made.__get__(block.ffn))
        return (patched,)


def without_helper(module: Any, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


without_helper.__qualname__ = "WanAttentionPatch.__get__.<locals>.wrapped_attention"


class TestOtherVersion:
    """The same patches, with something else in them."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "execute", "test"
    KINDS = ("another field", "another closure", "another place", "another module", "another helper")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "kind": (list(cls.KINDS),)}}

    def execute(self, model: Any, kind: str) -> Any:
        patched, blocks = model.clone(), model.get_model_object("diffusion_model").blocks
        made: Any = WanffnChunkPatch(2, 8)
        if kind == "another field":
            made.overlap = 1
        bound = made.__get__(blocks[1 if kind == "another module" else 0].ffn)
        if kind == "another closure":
            forward, settings = bound.__func__, {"overlap": 1}

            def wrapped_forward(module: Any, x: Any) -> Any:
                return forward(module, x, **settings)

            wrapped_forward.__qualname__ = forward.__qualname__
            bound = types.MethodType(wrapped_forward, blocks[0].ffn)
        place = {"another place": "cross_attn", "another helper": "self_attn"}.get(kind, "ffn")
        if kind == "another helper":
            bound = types.MethodType(without_helper, blocks[0].self_attn)
        patched.add_object_patch(REPLACED.format(0, place), bound)
        return (patched,)
