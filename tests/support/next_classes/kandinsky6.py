"""Kandinsky 6: video and sound, each with attention to itself, to its text, and to the other."""

import torch
from comfy.ldm.kandinsky5.model import TransformerDecoderBlock, attention
from support.next_classes.layers import waves
from torch import nn


class AsymCrossAttention(nn.Module):
    def __init__(self, dim, head_dim, other, operations, **place):
        super().__init__()
        self.heads = dim // head_dim
        self.to_query = operations.Linear(dim, dim, **place)
        self.to_key = operations.Linear(other, dim, **place)
        self.to_value = operations.Linear(other, dim, **place)

    def forward(self, x, context, rope_q=None, rope_kv=None, transformer_options={}):  # noqa: B006
        q, k, v = (
            layer(t).unflatten(2, (self.heads, -1))
            for layer, t in ((self.to_query, x), (self.to_key, context), (self.to_value, context))
        )
        return attention(q, k, v, self.heads, transformer_options=transformer_options)


class FusedTransformerDecoderBlock(nn.Module):
    def __init__(self, dims, head_dims, time_dim, operations, **place):
        super().__init__()
        settings = {"operations": operations, **place}
        self.videoT, self.audioT = (
            TransformerDecoderBlock(dim, time_dim, 2 * dim, head, operation_settings=settings)
            for dim, head in zip(dims, head_dims, strict=True)
        )
        self.va_cross_attention = AsymCrossAttention(dims[0], head_dims[0], dims[1], operations, **place)
        self.av_cross_attention = AsymCrossAttention(dims[1], head_dims[1], dims[0], operations, **place)

    def forward(
        self, visual_embed, audio_embed, video_text_embed, audio_text_embed, video_time_embed, audio_time_embed, visual_rope,
        audio_rope, transformer_options={},  # noqa: B006
    ):  # fmt: skip
        for block, kind in ((self.videoT, "visual"), (self.audioT, "audio")):
            x, text, time, rope = (
                (visual_embed, video_text_embed, video_time_embed, visual_rope)
                if kind == "visual"
                else (audio_embed, audio_text_embed, audio_time_embed, audio_rope)
            )
            x = x + block.self_attention(
                block.self_attention_norm(x) * time[:, None], rope, transformer_options=transformer_options
            )
            x = x + block.cross_attention(block.cross_attention_norm(x), text, transformer_options=transformer_options)
            visual_embed, audio_embed = (x, audio_embed) if kind == "visual" else (visual_embed, x)
        # Without transformer_options.
        from_audio = self.va_cross_attention(visual_embed, audio_embed)
        from_video = self.av_cross_attention(audio_embed, visual_embed)
        visual_embed, audio_embed = visual_embed + from_audio, audio_embed + from_video
        return visual_embed + self.videoT.feed_forward(visual_embed), audio_embed + self.audioT.feed_forward(audio_embed)


def rope_of(length, head_dim, device):
    """`[1, tokens, 1, D / 2, 2, 2]`."""
    angles = waves(torch.arange(length, device=device), head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2))[None, :, None]


class Kandinsky6NativeAVDiT(nn.Module):
    def __init__(self, dims, head_dims, channels, text_dim, blocks, operations, **place):
        super().__init__()
        self.head_dims = head_dims
        self.visual_in, self.audio_in = (operations.Linear(own, dim, **place) for own, dim in zip(channels, dims, strict=True))
        self.text_in = nn.ModuleList([operations.Linear(text_dim, dim, **place) for dim in dims])
        self.time_in = nn.ModuleList([operations.Linear(1, dim, **place) for dim in dims])
        self.visual_blocks = nn.ModuleList(
            [FusedTransformerDecoderBlock(dims, head_dims, 8, operations, **place) for _ in range(blocks)]
        )
        self.out_layer, self.audio_outLayer = (
            operations.Linear(dim, own, **place) for own, dim in zip(channels, dims, strict=True)
        )

    def forward(self, *args, **kwargs):
        return self._forward(*args, **kwargs)

    def _forward(self, x, timestep, context, y=None, control=None, transformer_options=None, k6_reference_tail=False, **kwargs):
        video, audio = x
        visual = self.visual_in(video.movedim(1, -1))
        grid, visual = visual.shape[:-1], visual.flatten(1, -2)
        sound = self.audio_in(audio)
        texts = [layer(context) for layer in self.text_in]
        times = [1.0 + layer(timestep[:, None]) for layer in self.time_in]
        ropes = [rope_of(t.shape[1], head, t.device) for t, head in zip((visual, sound), self.head_dims, strict=True)]
        for block in self.visual_blocks:
            visual, sound = block(visual, sound, *texts, *times, *ropes, transformer_options=transformer_options or {})
        return self.out_layer(visual.reshape(*grid, -1)).movedim(-1, 1), self.audio_outLayer(sound)
