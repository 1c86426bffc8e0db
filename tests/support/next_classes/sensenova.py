"""SenseNova U1.5: layers with one method for the prefix and one for the image, which attends to both."""

import torch
from comfy.ldm.modules.attention import optimized_attention
from support.next_classes.layers import Projections, waves
from torch import nn

EDGE = 4  # of a token, in pixels


class Layer(nn.Module):
    def __init__(self, dim, heads, kv_heads, operations, **place):
        super().__init__()
        self.text, self.image = (Projections(dim, heads, operations, kv_heads, **place) for _ in range(2))

    def forward_prefix(self, prefix, prefix_rope, prefix_mask, transformer_options):
        q, k, v = self._projected(self.text, prefix, prefix_rope)
        return prefix + self._attended(self.text, q, k, v, prefix_mask, transformer_options), k, v

    def forward_generation(self, image, image_rope, prefix_key, prefix_value, transformer_options):
        q, k, v = self._projected(self.image, image, image_rope)
        keys, values = torch.cat((prefix_key, k), 2), torch.cat((prefix_value, v), 2)
        return image + self._attended(self.image, q, keys, values, None, transformer_options)

    def _projected(self, own, x, rope):
        """Queries, keys and values, `[B, heads, tokens, D]`."""
        positions = torch.cat([part for pair in rope for part in pair], -1).transpose(1, 2)
        return [t.transpose(1, 2) for t in own.project(x, positions)]

    def _attended(self, own, q, k, v, mask, options):
        more = {"mask": mask, "skip_reshape": True, "transformer_options": options, "enable_gqa": True}
        return own.to_out(optimized_attention(q, k, v, own.heads, **more))


def rope_of(times, rows, columns, head_dim):
    """Three pairs of `[B, 1, tokens, part of D]`."""
    part = head_dim // 8
    sizes = (2 * part, part, part)
    return tuple(
        tuple(waves(position + shift, size)[:, None] for shift in (0.0, 0.5))
        for position, size in zip((times, rows, columns), sizes, strict=True)
    )


class SenseNovaU15(nn.Module):
    def __init__(self, dim, heads, kv_heads, layers, words, operations, image_model=None, **place):
        super().__init__()
        self.head_dim, pixels = dim // heads, 3 * EDGE * EDGE
        self.embed = operations.Embedding(words, dim, **place)
        self.image_in = operations.Linear(pixels, dim, **place)
        self.image_out = operations.Linear(dim, pixels, **place)
        self.language_model = nn.Module()
        self.language_model.model = nn.Module()
        self.language_model.model.layers = nn.ModuleList([Layer(dim, heads, kv_heads, operations, **place) for _ in range(layers)])
        self.language_model.model.norm_mot_gen = operations.RMSNorm(dim, **place)

    def prefix(self, ids):
        """Embeddings, positions, and a causal mask."""
        number = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        mask = torch.full((ids.shape[1],) * 2, float("-inf"), device=ids.device).triu(1)
        return self.embed(ids), rope_of(number, 0 * number, 0 * number, self.head_dim), mask

    def preprocess_prefix(self, ids):
        """Keys and values of every layer, and the number of tokens."""
        states, rope, mask = self.prefix(ids)
        kept = []
        for layer in self.language_model.model.layers:
            states, key, value = layer.forward_prefix(states, rope, mask, {})
            kept.append((key, value))
        return [key for key, _ in kept], [value for _, value in kept], torch.full((len(ids),), ids.shape[1], device=ids.device)

    def forward(self, x, timesteps, context=None, transformer_options={}, **kwargs):  # noqa: B006
        return self._forward(x, timesteps, context, transformer_options, **kwargs)

    def _forward(
        self, x, timesteps, context=None, transformer_options={}, text_input_ids=None, prefix_keys=None, prefix_values=None,  # noqa: B006
        prefix_time=None, **kwargs,
    ):  # fmt: skip
        batch, _, height, width = x.shape
        rows, columns = height // EDGE, width // EDGE
        patches = x.unfold(2, EDGE, EDGE).unfold(3, EDGE, EDGE).movedim(1, 3).flatten(1, 2).flatten(2)
        image = self.image_in(patches) + timesteps[:, None, None]
        if prefix_keys is None:
            prefix, prefix_rope, prefix_mask = self.prefix(text_input_ids)
            prefix_time = torch.full((batch,), text_input_ids.shape[1], device=x.device)
        number = torch.arange(rows * columns, device=x.device).expand(batch, -1)
        times = prefix_time[:, None].expand_as(number)
        rope = rope_of(times, number // columns, number % columns, self.head_dim)
        for index, layer in enumerate(self.language_model.model.layers):
            if prefix_keys is None:
                prefix, key, value = layer.forward_prefix(prefix, prefix_rope, prefix_mask, transformer_options)
            else:
                key, value = prefix_keys[index], prefix_values[index]
            image = layer.forward_generation(image, rope, key, value, transformer_options)
        image = self.image_out(self.language_model.model.norm_mot_gen(image)).view(batch, rows, columns, 3, EDGE, EDGE)
        return image.permute(0, 3, 1, 4, 2, 5).reshape(x.shape)
