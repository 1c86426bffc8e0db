"""YuE2: chunks of a song one after the other, each behind keys and values that the language model left."""

from dataclasses import dataclass

import torch
from comfy.ldm.modules.attention import optimized_attention_for_device
from comfy.text_encoders.llama import Qwen3_8BConfig, RMSNorm, TransformerBlock, precompute_freqs_cis
from torch import nn


@dataclass
class Config(Qwen3_8BConfig):
    hidden_size: int = 96
    intermediate_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 3
    num_key_value_heads: int = 1
    head_dim = 32


class YuE2(nn.Module):
    def __init__(self, operations, dtype=None, device=None, **kwargs):
        super().__init__()
        place = {"device": device, "dtype": dtype}
        config = self.config = Config(**kwargs.get("config", {}))
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([TransformerBlock(config, i, ops=operations, **place) for i in range(2)])
        self.model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **place)
        self.vae2llm = operations.Linear(64, config.hidden_size, **place)
        self.llm2vae = operations.Linear(config.hidden_size, 64, **place)

    def forward(self, x, timestep, context, yue2_chunks, transformer_options={}, **kwargs):  # noqa: B006
        config, out = self.config, torch.empty_like(x)
        attention = optimized_attention_for_device(x.device)
        kept = (config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim)
        for start, end, kv_start, kv_end in yue2_chunks:
            past, length = kv_end - kv_start, end - start + 2
            state = nn.functional.pad(x[..., start:end].transpose(1, 2), (0, 0, 1, 1))  # a token in front, and one behind
            state = self.vae2llm(state) + timestep[:, None, None]
            positions = torch.arange(past, past + length, device=x.device)[None]
            rope = precompute_freqs_cis(config.head_dim, positions, config.rope_theta, device=x.device)
            prefix = context[:, kv_start:kv_end].unflatten(2, kept).permute(2, 3, 0, 4, 1, 5)
            for layer, (keys, values) in zip(self.model.layers, prefix, strict=True):
                state, _ = layer(state, freqs_cis=rope, optimized_attention=attention, past_key_value=(keys, values, past))
            out[..., start:end] = self.llm2vae(self.model.norm(state))[:, 1:-1].transpose(1, 2)
        return out
