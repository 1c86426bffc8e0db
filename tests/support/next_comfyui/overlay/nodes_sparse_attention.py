"""The node for sparse attention: an override for all models, and patches of MiniMax-H3's blocks, which see a layer's input."""

import comfy.patcher_extension
import torch
from comfy.ldm.minimax.model import MiniMaxH3Model
from comfy.ldm.modules import layer_attention as ck

OVERRIDE = "optimized_attention_override"
CUBE = (1, 2, 2)  # of patches: ck.BLOCK tokens


class SparseAttnPatch:
    def __init__(self, tau, topk_ratio, vsa, sigma_start, sigma_end, min_tokens, dense_blocks, extra_tokens, verbose):
        self.tau, self.topk_ratio, self.vsa, self.extra_tokens, self.verbose = tau, topk_ratio, vsa, extra_tokens, verbose
        self.sigma_start, self.sigma_end, self.min_tokens, self.dense_blocks = sigma_start, sigma_end, min_tokens, dense_blocks
        self.installed = set()
        self.reset()

    def reset(self):
        self.vsa_plans = {}

    def dense_reason(self, transformer_options, tokens, block_index):
        sigma = float(transformer_options["sigmas"][0])
        if not self.sigma_end <= sigma <= self.sigma_start:
            return "outside of the steps"
        if tokens < self.min_tokens:
            return "too few tokens"
        return "a dense block" if block_index in self.dense_blocks else None

    def sinks(self, transformer_options, tokens):
        layout = transformer_options.get("minimax_h3_layout")
        if layout is None or layout.seq_len != tokens:
            return (0, 0), (0, 0)
        given = next(start for start, _, kind in layout.segments if kind == "video")
        return (0, -(-given // ck.BLOCK)), (0, 1)

    def vsa_plan(self, layout, device):
        key = layout.signature
        if key not in self.vsa_plans:
            tiles, prefix = [], 0
            for start, stop, kind in layout.segments:
                rows = torch.arange(start, stop)
                if kind == "video":
                    _, frames, height, width, _ = layout.signature
                    grid = rows.view(frames, height // 2, width // 2)
                    sides = [side for n, c in zip(reversed(grid.shape), reversed(CUBE), strict=True) for side in (0, -n % c)]
                    padded = torch.nn.functional.pad(grid, sides, value=-1)
                    t, h, w = (n // c for n, c in zip(padded.shape, CUBE, strict=True))
                    cubes = padded.view(t, CUBE[0], h, CUBE[1], w, CUBE[2]).permute(0, 2, 4, 1, 3, 5).reshape(-1, ck.BLOCK)
                    tiles.append(cubes.gather(1, (cubes < 0).int().argsort(dim=1, stable=True)))
                    continue
                padded = torch.nn.functional.pad(rows, (0, -len(rows) % ck.BLOCK), value=-1).view(-1, ck.BLOCK)
                tiles.append(padded)
                prefix += len(padded)
            source = torch.cat(tiles).flatten()
            inverse = torch.empty(layout.seq_len, dtype=torch.long)
            inverse[source[source >= 0]] = (source >= 0).nonzero().flatten()
            self.vsa_plans[key] = {
                "n": len(source), "n_prefix": prefix, "src": source, "inv": inverse,
                "block_len": (torch.cat(tiles) >= 0).sum(1).int(),
            }  # fmt: skip
        return self.vsa_plans[key]


def make_attention_override(patch, previous):
    def override(func, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
        def dense():
            given = dict(
                mask=mask, attn_precision=attn_precision, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape
            )
            args = (q, k, v, heads)
            return func(*args, **given, **kwargs) if previous is None else previous(func, *args, **given, **kwargs)

        options = kwargs.get("transformer_options") or {}
        tokens = q.shape[2 if skip_reshape else 1]
        if mask is not None or patch.vsa or q.shape != k.shape:
            return dense()
        if patch.dense_reason(options, tokens, options.get("block_index")) is not None:
            return dense()
        sinks, rows = patch.sinks(options, tokens)
        by_head = [x.transpose(1, 2) if skip_reshape else x.unflatten(-1, (heads, -1)) for x in (q, k, v)]
        out = ck.sol_attn(
            *by_head, tau=patch.tau, topk_ratio=patch.topk_ratio, sink_blocks=sinks, sink_q=rows, scale=kwargs.get("scale")
        )
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    return override


def install_override(patch, transformer_options):
    current = transformer_options.get(OVERRIDE)
    if current not in patch.installed:
        override = transformer_options[OVERRIDE] = make_attention_override(patch, current)
        patch.installed.add(override)


def h3_eligible(attn, x, rope_freqs, transformer_options, patch, block_index):
    if rope_freqs is None or patch.dense_reason(transformer_options, x.shape[0], block_index) is not None:
        return False
    return not patch.vsa or transformer_options["minimax_h3_layout"].seq_len == x.shape[0]


def h3_sparse_attention(attn, x, rope_freqs, transformer_options, patch):
    layout, heads = transformer_options["minimax_h3_layout"], attn.heads
    q, k, v = attn.heads_of(x, rope_freqs)
    if not patch.vsa:
        sinks, rows = patch.sinks(transformer_options, x.shape[0])
        out = ck.sol_attn(q, k, v, tau=patch.tau, topk_ratio=patch.topk_ratio, sink_blocks=sinks, sink_q=rows)
        return attn.out_proj(out[0].flatten(1))
    plan = patch.vsa_plan(layout, x.device)
    tiles = x[plan["src"].clamp(min=0)] * (plan["src"] >= 0)[:, None]
    turns = rope_freqs.new_zeros((1, plan["n"], *rope_freqs.shape[2:]))
    turns[0, plan["inv"]] = rope_freqs[0]
    prefix = (0, plan["n_prefix"])
    gate = attn.to_gate_compress and attn.to_gate_compress(tiles).view(1, plan["n"], heads, -1)
    out = ck.sol_attn(
        *attn.heads_of(tiles, turns), tau=patch.tau, topk_ratio=patch.topk_ratio, sink_blocks=prefix, sink_q=prefix, tail=False,
        block_len=plan["block_len"], coarse_gate=gate,
    )  # fmt: skip
    return attn.out_proj(out[0].flatten(1)[plan["inv"]])


def make_h3_block_patch(block, block_index, patch):
    def attention(h, rope_freqs=None, transformer_options=None):
        return h3_sparse_attention(block.attn, h, rope_freqs, transformer_options, patch)

    def block_patch(args, extra):
        if h3_eligible(block.attn, args["img"], args["rope_freqs"], args["transformer_options"], patch, block_index):
            args = {**args, "attention": attention}
        return extra["original_block"](args)

    return block_patch


class BlockSparseAttention:
    @classmethod
    def INPUT_TYPES(cls):
        number = ("FLOAT", {"default": 0.0})
        return {
            "required": {
                "model": ("MODEL",),
                "method": (["sol-attn", "sla", "vsa"],),
                "tau": ("FLOAT", {"default": 0.5}),
                "keep": ("FLOAT", {"default": 0.3}),
                "start_percent": number,
                "end_percent": ("FLOAT", {"default": 1.0}),
                "dense_blocks": ("STRING", {"default": ""}),
                "min_tokens": ("INT", {"default": 0}),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "execute"
    CATEGORY = "model/patch"

    def execute(self, model, method, tau, keep, start_percent, end_percent, dense_blocks, min_tokens):
        sampling = model.get_model_object("model_sampling")
        patch = SparseAttnPatch(
            tau=tau, topk_ratio=0.0 if method == "sol-attn" else keep, vsa=method == "vsa", extra_tokens=0, verbose=True,
            sigma_start=float(sampling.percent_to_sigma(start_percent)), sigma_end=float(sampling.percent_to_sigma(end_percent)),
            min_tokens=min_tokens, dense_blocks={int(number) for number in dense_blocks.split(",") if number},
        )  # fmt: skip
        patched = model.clone()
        install_override(patch, patched.model_options["transformer_options"])
        patched.add_callback_with_key(
            comfy.patcher_extension.CallbacksMP.ON_PREPARE_STATE, "block_sparse_attention",
            lambda patcher, timestep, model_options: install_override(patch, model_options["transformer_options"]),
        )  # fmt: skip
        patched.add_callback_with_key(
            comfy.patcher_extension.CallbacksMP.ON_CLEANUP, "block_sparse_attention", lambda patcher: patch.reset()
        )
        transformer = model.get_model_object("diffusion_model")
        if isinstance(transformer, MiniMaxH3Model):
            for index, block in enumerate(transformer.blocks):
                patched.set_model_patch_replace(make_h3_block_patch(block, index, patch), "dit", "double_block", index)
        return (patched,)


NODE_CLASS_MAPPINGS = {"BlockSparseAttention": BlockSparseAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"BlockSparseAttention": "Model Sparse Attention"}
