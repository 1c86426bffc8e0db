"""Calls of the tiny models of diffusers_configs.py that use what they can do, and the names of other checks.

Imported by the rank scripts (which load diffusers) and by the tests (which do not).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.faults import SOAK
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def grid(height: int, width: int) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1).float()


def padding(*valid: int, length: int) -> Tensor:
    """A text mask `[B, length]`, boolean: sample b has `valid[b]` tokens, the rest is padding."""
    return torch.arange(length)[None] < torch.tensor(valid)[:, None]


def flux(batch: int = 1, height: int = 6, width: int = 5, text: int = 7, **extra: Any) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, height * width, 16), encoder_hidden_states=normal(batch, text, 24),
        pooled_projections=normal(batch, 12), timestep=torch.linspace(0.3, 0.9, batch), img_ids=grid(height, width),
        txt_ids=torch.zeros(text, 3), guidance=torch.full((batch,), 3.5),
    ) | extra  # fmt: skip


def flux_2(batch: int = 1, height: int = 6, width: int = 5, text: int = 7) -> dict[str, Any]:
    image_ids = torch.cat([grid(height, width), torch.zeros(height * width, 1)], -1)
    text_ids = torch.cat([torch.zeros(text, 3), torch.arange(text)[:, None].float()], -1)
    return dict(
        hidden_states=normal(batch, height * width, 16), encoder_hidden_states=normal(batch, text, 24),
        timestep=torch.linspace(0.3, 0.9, batch), img_ids=image_ids.expand(batch, -1, -1),
        txt_ids=text_ids.expand(batch, -1, -1), guidance=torch.full((batch,), 3.5),
    )  # fmt: skip


def qwen(batch: int = 1, images: tuple[tuple[int, int], ...] = ((6, 5),), text: int = 7, **extra: Any) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, sum(h * w for h, w in images), 16), encoder_hidden_states=normal(batch, text, 24),
        timestep=torch.linspace(0.3, 0.9, batch), img_shapes=[[(1, h, w) for h, w in images]] * batch,
    ) | extra  # fmt: skip


def wan(
    batch: int = 1, frames: int = 3, height: int = 8, width: int = 10, text: int = 6, channels: int = 8, **extra: Any
) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, channels, frames, height, width), timestep=torch.linspace(300.0, 900.0, batch),
        encoder_hidden_states=normal(batch, text, 24),
    ) | extra  # fmt: skip


def wan_i2v(image: int = 9, **extra: Any) -> dict[str, Any]:
    # The model takes the last 512 tokens for text, whatever their number.
    call = wan(channels=20, text=512, **extra)
    return {**call, "encoder_hidden_states_image": normal(call["hidden_states"].shape[0], image, 20)}


def token_timesteps(batch: int, tokens: int) -> Tensor:
    """A noise level per token, `[B, tokens]`, as Wan 2.2 5B gives its first frame another one than the rest."""
    return torch.where(torch.arange(tokens) < tokens // 3, 0.0, torch.linspace(300.0, 900.0, batch)[:, None])


def ltx(batch: int = 1, frames: int = 3, height: int = 4, width: int = 5, text: int = 7, **extra: Any) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, frames * height * width, 16), encoder_hidden_states=normal(batch, text, 24),
        timestep=torch.linspace(300.0, 900.0, batch), encoder_attention_mask=torch.ones(batch, text), num_frames=frames,
        height=height, width=width, rope_interpolation_scale=(1.0, 32.0, 32.0),
    ) | extra  # fmt: skip


def ltx_2(batch: int = 1, audio: int = 5, **extra: Any) -> dict[str, Any]:
    call = ltx(batch)
    del call["rope_interpolation_scale"]
    # Without attention between video and audio, unless `isolate_modalities` is False, as in its pipelines.
    call.update(
        audio_hidden_states=normal(batch, audio, 12), audio_encoder_hidden_states=normal(batch, 6, 24), audio_num_frames=audio,
        encoder_attention_mask=torch.ones(batch, 7), audio_encoder_attention_mask=torch.ones(batch, 6), isolate_modalities=True,
    )  # fmt: skip
    return {**call, **extra}


def ltx_2_3(batch: int = 1, audio: int = 5, **extra: Any) -> dict[str, Any]:
    """As its pipelines call it: the text is projected before, and other numbers modulate attention between video and audio."""
    call = ltx_2(batch, audio, isolate_modalities=False)
    call |= dict(
        encoder_hidden_states=normal(batch, 7, 48), audio_encoder_hidden_states=normal(batch, 6, 32),
        sigma=torch.linspace(300.0, 900.0, batch), use_cross_timestep=True,
    )  # fmt: skip
    return call | extra


def token_steps(batch: int, tokens: int, audio: int) -> dict[str, Any]:
    """Noise levels of video from an image: one per token of the video and of the audio."""
    return dict(timestep=token_timesteps(batch, tokens), audio_timestep=token_timesteps(batch, audio))


def helios(history: bool = False, batch: int = 1, **extra: Any) -> dict[str, Any]:
    call = wan(batch=batch, height=8, width=12, **extra)
    if history:
        indices = torch.arange(7 + 3).expand(batch, -1)
        call.update(
            indices_latents_history_long=indices[:, :4], latents_history_long=normal(batch, 8, 4, 8, 12, seed=1),
            indices_latents_history_mid=indices[:, 4:6], latents_history_mid=normal(batch, 8, 2, 8, 12, seed=2),
            indices_latents_history_short=indices[:, 6:7], latents_history_short=normal(batch, 8, 1, 8, 12, seed=3),
            indices_hidden_states=indices[:, 7:],
        )  # fmt: skip
    return call


def minimax(batch: int = 1, video: int = 20, audio: int = 6, text: int = 7) -> dict[str, Any]:
    total = text + audio + video
    indices = torch.arange(total)
    tags = torch.cat([torch.full((text,), 1), torch.full((audio,), 2), torch.zeros(video, dtype=torch.long)])
    return dict(
        hidden_states=normal(batch, video, 16), audio_hidden_states=normal(batch, audio, 6),
        encoder_hidden_states=normal(batch, text, 24), timestep=torch.tensor([0.3, 0.8]), timestep_indices=(tags == 2).long(),
        token_tags=tags, position_ids=torch.stack([indices // 7, indices % 7, indices % 3], -1), text_indices=indices[:text],
        audio_indices=indices[text : text + audio], video_indices=indices[text + audio :],
    )  # fmt: skip


def hunyuan(batch: int = 1, text: int = 7, valid: tuple[int, ...] = (4,), width: int = 10, **extra: Any) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, 4, 3, 6, width), timestep=torch.linspace(300.0, 900.0, batch),
        encoder_hidden_states=normal(batch, text, 24), encoder_attention_mask=padding(*valid, length=text).long(),
        pooled_projections=normal(batch, 12), guidance=torch.full((batch,), 3500.0),
    ) | extra  # fmt: skip


def hunyuan_image(batch: int = 1, text: int = 7, valid: tuple[int, ...] = (4,)) -> dict[str, Any]:
    call = hunyuan(batch, text, valid)
    del call["pooled_projections"], call["guidance"]
    return {**call, "hidden_states": normal(batch, 4, 5, 6)}


def hunyuan_15(batch: int = 1, valid: tuple[int, ...] = (4,), valid_2: tuple[int, ...] = (2,)) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, 4, 2, 3, 5), timestep=torch.linspace(300.0, 900.0, batch),
        encoder_hidden_states=normal(batch, 7, 24), encoder_attention_mask=padding(*valid, length=7).long(),
        encoder_hidden_states_2=normal(batch, 4, 20), encoder_attention_mask_2=padding(*valid_2, length=4).long(),
        image_embeds=torch.zeros(batch, 3, 16),
    )  # fmt: skip


def sd3(batch: int = 1, text: int = 7) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, 4, 12, 10), encoder_hidden_states=normal(batch, text, 24),
        pooled_projections=normal(batch, 12), timestep=torch.linspace(300.0, 900.0, batch),
    )  # fmt: skip


def cogvideox(batch: int = 1) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, 3, 4, 8, 10), encoder_hidden_states=normal(batch, 7, 24),
        timestep=torch.linspace(300.0, 900.0, batch),
    )  # fmt: skip


def pixart(batch: int = 1, valid: tuple[int, ...] = (4,)) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, 4, 12, 10), encoder_hidden_states=normal(batch, 7, 24),
        timestep=torch.linspace(300.0, 900.0, batch), encoder_attention_mask=padding(*valid, length=7).float(),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    )  # fmt: skip


def hunyuan_dit(batch: int = 1, **extra: Any) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, 4, 12, 10), timestep=torch.full((batch,), 300.0), encoder_hidden_states=normal(batch, 5, 24),
        text_embedding_mask=padding(3, length=5).long().expand(batch, -1), encoder_hidden_states_t5=normal(batch, 6, 16),
        text_embedding_mask_t5=torch.ones(batch, 6).long(), image_rotary_emb=(normal(30, 12), normal(30, 12, seed=1)),
        image_meta_size=torch.tensor([[96.0, 80.0, 96.0, 80.0, 0.0, 0.0]]).expand(batch, -1), style=torch.zeros(batch).long(),
    ) | extra  # fmt: skip


def residuals(count: int, batch: int = 1, tokens: int = 30, channels: int = 64) -> list[Tensor]:
    """Those of a ControlNet, for every block or for several in turn."""
    return [normal(batch, tokens, channels, seed=seed) for seed in range(1, count + 1)]


def flux_controlnet(batch: int = 1, height: int = 6, **extra: Any) -> dict[str, Any]:
    found = residuals(3, batch, height * 5)
    return flux(batch, height, controlnet_block_samples=found[:2], controlnet_single_block_samples=found[2:], **extra)


def wan_vace(batch: int = 1, **shape: int) -> dict[str, Any]:
    call = wan(batch, **shape)
    _, _, *video = call["hidden_states"].shape
    return {**call, "control_hidden_states": normal(batch, 12, *video), "control_hidden_states_scale": torch.tensor([0.7, 1.2])}


def skyreels_forcing(batch: int = 1, **shape: int) -> dict[str, Any]:
    """A noise level per frame, and frames that do not see later ones but those of their block."""
    timesteps = torch.linspace(300.0, 900.0, batch * 4).view(batch, 4)
    return wan(batch, frames=4, timestep=timesteps, enable_diffusion_forcing=True, **shape)


def lumina_2(batch: int = 1, valid: tuple[int, ...] = (4,)) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, 4, 12, 10), timestep=torch.linspace(0.3, 0.9, batch),
        encoder_hidden_states=normal(batch, 7, 24), encoder_attention_mask=padding(*valid, length=7),
    )  # fmt: skip


def like_flux(batch: int = 1, height: int = 6, text: int = 7, **extra: Any) -> dict[str, Any]:
    call = flux(batch, height, text=text)
    del call["pooled_projections"], call["guidance"]
    return call | extra


def chroma(batch: int = 1, valid: int = 4, **extra: Any) -> dict[str, Any]:
    """The mask is of text and image."""
    return like_flux(batch, attention_mask=torch.cat([padding(valid, length=7), torch.ones(1, 30).bool()], 1), **extra)


def cogview(batch: int = 1, **extra: Any) -> dict[str, Any]:
    size = torch.tensor([[96.0, 80.0]]).expand(batch, -1)
    return dict(
        hidden_states=normal(batch, 4, 12, 10), encoder_hidden_states=normal(batch, 7, 24), original_size=size, target_size=size,
        timestep=torch.linspace(300.0, 900.0, batch), crop_coords=torch.zeros(batch, 2),
    ) | extra  # fmt: skip


def glm_image(batch: int = 1) -> dict[str, Any]:
    call = cogview(batch)
    del call["original_size"]
    tokens = torch.arange(30).expand(batch, -1)
    return call | dict(prior_token_id=tokens, prior_token_drop=torch.zeros(batch, 30).bool())


def auraflow(batch: int = 1, text: int = 7) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, 4, 12, 10), encoder_hidden_states=normal(batch, text, 24),
        timestep=torch.linspace(0.3, 0.9, batch),
    )  # fmt: skip


def framepack(batch: int = 1, valid: tuple[int, ...] = (4,)) -> dict[str, Any]:
    indices = torch.arange(10)
    return hunyuan(batch, valid=valid) | dict(
        image_embeds=normal(batch, 3, 16), indices_latents=indices[7:], latents_clean=normal(batch, 4, 1, 6, 10, seed=1),
        indices_latents_clean=indices[6:7], latents_history_2x=normal(batch, 4, 2, 6, 10, seed=2),
        indices_latents_history_2x=indices[4:6], latents_history_4x=normal(batch, 4, 4, 6, 10, seed=3),
        indices_latents_history_4x=indices[:4],
    )  # fmt: skip


def hidream(batch: int = 1, height: int = 12, width: int = 12) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, 4, height, width), timesteps=torch.linspace(300.0, 900.0, batch),
        encoder_hidden_states_t5=normal(batch, 5, 24), encoder_hidden_states_llama3=normal(3, batch, 6, 20),
        pooled_embeds=normal(batch, 12),
    )  # fmt: skip


def krea_2(batch: int = 1, valid: tuple[int, ...] = (4,)) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, 30, 16), encoder_hidden_states=normal(batch, 7, 3, 24),
        timestep=torch.linspace(0.3, 0.9, batch), position_ids=torch.cat([torch.zeros(7, 3), grid(6, 5)]),
        encoder_attention_mask=padding(*valid, length=7),
    )  # fmt: skip


def z_image(sizes: tuple[tuple[int, int], ...] = ((12, 10),), texts: tuple[int, ...] = (7,), **extra: Any) -> dict[str, Any]:
    return dict(
        x=[normal(4, 1, *size) for size in sizes], t=torch.linspace(0.3, 0.9, len(sizes)),
        cap_feats=[normal(text, 24) for text in texts],
    ) | extra  # fmt: skip


def z_image_omni(batch: int, images: int = 2) -> dict[str, Any]:
    """Pictures to look at, and the one to make, which is the last."""
    items, seen = range(batch), range(images - 1)
    return dict(
        x=[[normal(4, 1, 8, 8, seed=10 * i + j) for j in range(images)] for i in items], t=torch.linspace(0.3, 0.9, batch),
        cap_feats=[[normal(5, 24, seed=10 * i + j) for j in range(images + 1)] for i in items],
        siglip_feats=[[*(normal(2, 3, 12, seed=10 * i + j) for j in seen), None] for i in items],
        image_noise_mask=[[*(0 for _ in seen), 1] for _ in items],
    )  # fmt: skip


def cosmos(batch: int = 1, channels: int = 4, **extra: Any) -> dict[str, Any]:
    return dict(
        hidden_states=normal(batch, channels, 3, 6, 10), timestep=torch.linspace(0.3, 0.9, batch),
        encoder_hidden_states=normal(batch, 7, 24), fps=16, padding_mask=torch.zeros(1, 1, 6, 10),
    ) | extra  # fmt: skip


def allegro(batch: int = 1, valid: tuple[int, ...] = (4,), **extra: Any) -> dict[str, Any]:
    places = torch.cartesian_prod(torch.arange(3), torch.arange(4), torch.arange(5)).T[:, None]
    angles = [torch.linspace(0, 9, 4 * count).view(count, 4) for count in (3, 4, 5)]
    return dict(
        hidden_states=normal(batch, 4, 3, 8, 10), encoder_hidden_states=normal(batch, 7, 24),
        encoder_attention_mask=padding(*valid, length=7), timestep=torch.linspace(300.0, 900.0, batch),
        image_rotary_emb=(tuple((each.cos(), each.sin()) for each in angles), tuple(places)),
    ) | extra  # fmt: skip


def wan_animate(batch: int = 1, face: int = 8) -> dict[str, Any]:
    return wan_i2v(batch=batch) | dict(
        hidden_states=normal(batch, 20, 3, 8, 10), pose_hidden_states=normal(batch, 8, 2, 8, 10),
        face_pixel_values=normal(batch, 3, face, 16, 16),
    )  # fmt: skip


def mochi(*valid: int) -> dict[str, Any]:
    return dict(
        hidden_states=normal(len(valid), 4, 3, 8, 10), encoder_hidden_states=normal(len(valid), 7, 24),
        timestep=torch.linspace(300.0, 900.0, len(valid)), encoder_attention_mask=padding(*valid, length=7),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call: the input named `mask` has padding in it, and the output must depend on it.

    Where it is causal, the first token is the one that all others see.
    """

    name: str
    model: str
    make: Callable[[], dict[str, Any]]
    mask: str | None = None
    causal: bool = False


QWEN_MASK, LTX_MASK = "encoder_hidden_states_mask", "encoder_attention_mask"
CASES = [
    Case("flux", "flux", flux),
    Case("flux batch 2", "flux", lambda: flux(batch=2)),
    Case("flux even", "flux", lambda: flux(height=6, width=4, text=12)),
    Case("flux odd batch 2", "flux", lambda: flux(batch=2, height=7, width=5, text=5)),
    Case("flux one text token", "flux", lambda: flux(text=1)),
    Case("flux two text tokens batch 2", "flux", lambda: flux(batch=2, text=2)),
    Case("flux three image tokens", "flux", lambda: flux(height=1, width=3, text=6)),
    Case("flux 3 heads", "flux 3 heads", flux),
    Case("flux 1 head", "flux 1 head", lambda: flux(text=3)),
    Case("flux schnell", "flux schnell", lambda: flux(guidance=None)),
    Case("flux 2 klein", "flux 2 klein", lambda: {**flux_2(), "guidance": None}),
    Case("flux 2", "flux 2", flux_2),
    Case("flux 2 batch 2 two text tokens", "flux 2", lambda: flux_2(batch=2, height=5, text=2)),
    Case("qwen", "qwen", qwen),
    Case("qwen one text token", "qwen", lambda: qwen(text=1)),
    Case("qwen mask", "qwen", lambda: qwen(text=9, encoder_hidden_states_mask=padding(4, length=9)), QWEN_MASK),
    Case("qwen mask batch 2", "qwen",
        lambda: qwen(batch=2, images=((7, 5),), text=8, encoder_hidden_states_mask=padding(8, 3, length=8)), QWEN_MASK),
    # Padding before and between: nothing says that valid tokens come first.
    Case("qwen scattered mask", "qwen",
        lambda: qwen(text=6, encoder_hidden_states_mask=torch.tensor([[0, 1, 1, 0, 0, 1]])), QWEN_MASK),
    Case("qwen mask two text tokens", "qwen", lambda: qwen(batch=2, text=2, encoder_hidden_states_mask=padding(1, 2, length=2)),
        QWEN_MASK),
    Case("qwen 3 heads mask", "qwen 3 heads",
        lambda: qwen(text=5, images=((1, 13),), encoder_hidden_states_mask=padding(3, length=5)), QWEN_MASK),
    Case("qwen edit", "qwen edit", lambda: qwen(images=((6, 5), (3, 4)))),
    Case("qwen edit mask batch 2", "qwen edit",
        lambda: qwen(batch=2, images=((5, 5), (3, 4)), encoder_hidden_states_mask=padding(2, 6, length=7)), QWEN_MASK),
    # The first of them counts for positions.
    Case("qwen batch 2 of two shapes", "qwen", lambda: qwen(2) | dict(img_shapes=[[(1, 6, 5)], [(1, 5, 6)]])),
    Case("qwen layered", "qwen layered",
        lambda: qwen(images=((3, 4), (3, 4), (3, 4), (3, 4)), additional_t_cond=torch.tensor([0]))),
    Case("wan t2v", "wan t2v", wan),
    Case("wan t2v batch 2 odd", "wan t2v", lambda: wan(batch=2, frames=3, height=6, width=6, text=5)),
    Case("wan one frame one text token", "wan t2v", lambda: wan(frames=1, text=1)),
    Case("wan three tokens", "wan t2v", lambda: wan(frames=1, height=2, width=6)),
    Case("wan 3 heads", "wan 3 heads", wan),
    # The text is not sharded: as many of its tokens as a rank has of the video (or as there are in all) change nothing.
    *(Case(f"wan {text} text tokens", "wan t2v", lambda text=text: wan(text=text)) for text in (60, 30, 20, 15)),
    Case("wan token timesteps", "wan t2v", lambda: wan(timestep=token_timesteps(1, 60))),
    Case("wan token timesteps batch 2 odd", "wan t2v", lambda: wan(batch=2, height=6, width=6, timestep=token_timesteps(2, 27))),
    Case("wan i2v", "wan i2v", wan_i2v),
    Case("wan i2v batch 2 odd", "wan i2v", lambda: wan_i2v(batch=2, height=6, width=6, image=5)),
    Case("wan flf2v", "wan flf2v", lambda: wan_i2v() | dict(encoder_hidden_states_image=normal(2, 6, 20))),
    Case("wan flf2v batch 2", "wan flf2v", lambda: wan_i2v(batch=2) | dict(encoder_hidden_states_image=normal(4, 6, 20))),
    Case("ltx", "ltx", ltx),
    Case("ltx one text token", "ltx", lambda: ltx(text=1)),
    # Two streams that have the same share on some ranks, and on others not.
    Case("ltx one text token less than video", "ltx", lambda: ltx(text=59)),
    Case("ltx mask", "ltx", lambda: ltx(encoder_attention_mask=padding(3, length=7)), LTX_MASK),
    Case("ltx mask batch 2 odd", "ltx",
        lambda: ltx(batch=2, height=3, width=3, text=10, encoder_attention_mask=padding(10, 4, length=10)), LTX_MASK),
    Case("ltx mask two text tokens", "ltx", lambda: ltx(text=2, encoder_attention_mask=padding(1, length=2)), LTX_MASK),
    Case("ltx mask one text token more than video", "ltx",
        lambda: ltx(batch=2, text=61, encoder_attention_mask=padding(30, 50, length=61)), LTX_MASK),
    Case("ltx 3 heads mask", "ltx 3 heads", lambda: ltx(encoder_attention_mask=padding(5, length=7)), LTX_MASK),
    Case("ltx from an image", "ltx", lambda: ltx(timestep=token_timesteps(1, 60))),
    Case("ltx from an image batch 2 odd", "ltx",
        lambda: ltx(2, height=3, width=3, timestep=token_timesteps(2, 27), video_coords=normal(2, 3, 27))),
    Case("ltx 2", "ltx 2", ltx_2),
    Case("ltx 2 with audio", "ltx 2", lambda: ltx_2(isolate_modalities=False)),
    Case("ltx 2 with audio batch 2 token timesteps", "ltx 2",
        lambda: ltx_2(batch=2, audio=4, isolate_modalities=False, timestep=token_timesteps(2, 60),
            audio_timestep=torch.linspace(300.0, 900.0, 2), encoder_attention_mask=padding(3, 6, length=7)), LTX_MASK),
    Case("ltx 2 interleaved", "ltx 2 interleaved", ltx_2),
    Case("ltx 2 interleaved with audio", "ltx 2 interleaved", lambda: ltx_2(isolate_modalities=False)),
    Case("ltx 2.3", "ltx 2.3", ltx_2_3),
    Case("ltx 2.3 from an image batch 2", "ltx 2.3", lambda: ltx_2_3(2, 4, **token_steps(2, 60, 4))),
    Case("ltx 2.5 keyframes", "ltx 2.5",
        lambda: ltx_2_3(video_keyframes_mask=(torch.arange(60) < 20).float()[None, :, None], **token_steps(1, 60, 5)),
        "video_keyframes_mask"),
    Case("ltx 2 references batch 2", "ltx 2", lambda: ltx_2(2, isolate_modalities=False, video_self_attention_mask=
        (normal(2, 60, 60) > 0).float()), "video_self_attention_mask"),
    Case("ltx 2 mask batch 2", "ltx 2", lambda: ltx_2(batch=2, encoder_attention_mask=padding(3, 6, length=7)), LTX_MASK),
    Case("chronoedit", "chronoedit", wan_i2v),
    Case("chronoedit two frames batch 2", "chronoedit", lambda: wan_i2v(batch=2, frames=2, height=6, width=6)),
    Case("helios", "helios", helios),
    Case("helios history", "helios", lambda: helios(history=True)),
    Case("minimax h3", "minimax h3", minimax),
    Case("minimax h3 odd batch 2", "minimax h3", lambda: minimax(batch=2, video=21, text=5)),
    # Image tokens for the cross-attention that IP-Adapter adds; another number of them needs no other plan.
    *(
        Case(
            f"flux ip adapter {tokens} tokens",
            "flux ip adapter",
            lambda tokens=tokens: flux(joint_attention_kwargs={"ip_adapter_image_embeds": [normal(1, tokens, 20)]}),
        )
        for tokens in (4, 15, 30)
    ),
    # The image stands before the text, whose padding is masked.
    Case("hunyuan video", "hunyuan video", hunyuan, LTX_MASK),
    Case("hunyuan video batch 2", "hunyuan video", lambda: hunyuan(2, valid=(7, 2), width=6), LTX_MASK),
    Case("hunyuan video two text tokens", "hunyuan video", lambda: hunyuan(text=2, valid=(1,)), LTX_MASK),
    # The first frame, 15 tokens or 9, is modulated apart.
    Case("hunyuan video from an image", "hunyuan video from an image", hunyuan, LTX_MASK),
    Case("hunyuan video from an image batch 2", "hunyuan video from an image",
        lambda: hunyuan(2, valid=(7, 2), width=6), LTX_MASK),
    Case("hunyuan video distilled", "hunyuan video distilled", lambda: hunyuan(guidance=None), LTX_MASK),
    Case("hunyuan image distilled", "hunyuan image distilled",
        lambda: hunyuan_image() | dict(guidance=torch.tensor([3500.0]), timestep_r=torch.tensor([200.0]),
            encoder_hidden_states_2=normal(1, 4, 20), encoder_attention_mask_2=padding(3, length=4).long()), LTX_MASK),
    Case("hunyuan image", "hunyuan image", hunyuan_image, LTX_MASK),
    Case("hunyuan image batch 2", "hunyuan image", lambda: hunyuan_image(2, 5, (2, 4)), LTX_MASK),
    Case("hunyuan video 1.5", "hunyuan video 1.5", hunyuan_15, LTX_MASK),
    Case("hunyuan video 1.5 batch 2", "hunyuan video 1.5", lambda: hunyuan_15(2, (5, 2), (0, 4)), LTX_MASK),
    Case("hunyuan video 1.5 from an image", "hunyuan video 1.5",
        lambda: hunyuan_15() | dict(image_embeds=normal(1, 3, 16)), LTX_MASK),
    Case("hunyuan video 1.5 meanflow", "hunyuan video 1.5 meanflow",
        lambda: hunyuan_15() | dict(timestep_r=torch.tensor([200.0])), LTX_MASK),
    Case("sd3.5 medium", "sd3.5 medium", sd3),
    Case("sd3", "sd3", sd3),
    Case("sd3 batch 2 two text tokens", "sd3", lambda: sd3(2, 2)),
    Case("cogvideox", "cogvideox", cogvideox),
    Case("cogvideox rope batch 2", "cogvideox rope",
        lambda: dict(cogvideox(2), image_rotary_emb=tuple(normal(60, 16, seed=i) for i in range(2)))),
    Case("cogvideox from an image", "cogvideox from an image",
        lambda: cogvideox() | dict(image_rotary_emb=tuple(normal(60, 16, seed=i) for i in range(2)))),
    Case("cogvideox 1.5", "cogvideox 1.5",
        lambda: cogvideox() | dict(hidden_states=normal(1, 4, 4, 8, 10), ofs=torch.tensor([2.0]),
            image_rotary_emb=tuple(normal(40, 16, seed=i) for i in range(2)))),
    Case("pixart alpha", "pixart alpha",
        lambda: pixart() | dict(added_cond_kwargs=dict(
            resolution=torch.tensor([[96.0, 80.0]]), aspect_ratio=torch.tensor([[1.2]]))), LTX_MASK),
    Case("pixart", "pixart", pixart, LTX_MASK),
    Case("flux controlnet", "flux", flux_controlnet),
    Case("flux controlnet batch 2", "flux", lambda: flux_controlnet(2, 5, controlnet_blocks_repeat=True)),
    Case("qwen controlnet", "qwen", lambda: qwen(controlnet_block_samples=residuals(2))),
    Case("sd3 controlnet", "sd3", lambda: sd3() | dict(block_controlnet_hidden_states=residuals(1, channels=48))),
    Case("hunyuan dit controlnet", "hunyuan dit", lambda: hunyuan_dit(controlnet_block_samples=residuals(1, channels=48))),
    # Not a mask: without what is in it the output is another one as well.
    Case("wan vace", "wan vace", wan_vace, "control_hidden_states"),
    Case("wan vace batch 2 odd", "wan vace", lambda: wan_vace(2, height=6, width=6), "control_hidden_states"),
    Case("skyreels", "skyreels", wan),
    Case("skyreels forcing", "skyreels forcing", skyreels_forcing, causal=True),
    Case("skyreels forcing batch 2", "skyreels forcing", lambda: skyreels_forcing(2, height=6, width=6), causal=True),
    Case("skyreels from an image", "skyreels from an image", lambda: wan_i2v(fps=torch.tensor([1]))),
    Case("hunyuan dit", "hunyuan dit", hunyuan_dit, "text_embedding_mask"),
    # The text is cut to its valid tokens, item by item, before the image stands behind it: one stream.
    Case("lumina 2", "lumina 2", lumina_2, LTX_MASK),
    Case("lumina 2 batch 2", "lumina 2", lambda: lumina_2(2, (3, 7)), LTX_MASK),
    Case("chroma", "chroma", chroma, "attention_mask"),
    Case("chroma controlnet", "chroma", lambda: like_flux(controlnet_block_samples=residuals(2),
        controlnet_single_block_samples=residuals(1))),
    Case("bria", "bria", like_flux),
    Case("bria controlnet batch 2", "bria", lambda: like_flux(2, controlnet_block_samples=residuals(2, 2))),
    Case("bria fibo", "bria fibo", lambda: like_flux(text_encoder_layers=[normal(1, 7, 20, seed=i) for i in range(4)])),
    Case("longcat", "longcat", like_flux),
    Case("longcat one text token batch 2", "longcat", lambda: like_flux(2, 5, 1)),
    Case("ovis", "ovis", like_flux),
    Case("cogview 3", "cogview 3", cogview),
    Case("cogview 4", "cogview 4", cogview),
    Case("cogview 4 batch 2", "cogview 4", lambda: cogview(2)),
    Case("easyanimate", "easyanimate", lambda: auraflow() | dict(hidden_states=normal(1, 4, 3, 6, 10),
        encoder_hidden_states_t5=normal(1, 5, 20))),
    Case("glm image", "glm image", glm_image),
    Case("auraflow", "auraflow", auraflow),
    Case("auraflow batch 2 one text token", "auraflow", lambda: auraflow(2, 1)),
    Case("consisid", "consisid", lambda: cogvideox() | dict(id_cond=normal(1, 8),
        id_vit_hidden=[normal(1, 4, 8, seed=i) for i in range(5)])),
    Case("framepack", "framepack", framepack, LTX_MASK),
    Case("framepack batch 2", "framepack", lambda: framepack(2, (7, 3)), LTX_MASK),
    Case("hidream", "hidream", hidream),
    Case("hidream batch 2 not square", "hidream", lambda: hidream(2, 12, 8)),
    Case("krea 2", "krea 2", krea_2, LTX_MASK),
    Case("krea 2 batch 2", "krea 2", lambda: krea_2(2, (3, 7)), LTX_MASK),
    Case("z image", "z image", z_image),
    Case("z image controlnet", "z image", lambda: z_image(controlnet_block_samples={1: normal(1, 64, 48)})),
    Case("z image omni batch 2", "z image omni", lambda: z_image_omni(2)),
    Case("z image batch 2", "z image", lambda: z_image(((12, 10),) * 2, (7, 40))),
    Case("z image batch 2 of two sizes", "z image", lambda: z_image(((12, 10), (8, 8)), (7, 40))),
    Case("cosmos", "cosmos", cosmos),
    Case("cosmos 2 from frames batch 2", "cosmos 2", lambda: cosmos(2, condition_mask=torch.ones(2, 1, 3, 6, 10),
        timestep=torch.linspace(0.1, 0.9, 6).view(2, 1, 3, 1, 1))),
    Case("cosmos 2 controlnet", "cosmos 2", lambda: cosmos(channels=5, block_controlnet_hidden_states=residuals(2, 1, 45, 48))),
    Case("cogview 4 mask batch 2", "cogview 4", lambda: cogview(2, attention_mask=padding(4, 6, length=7)), "attention_mask"),
    Case("glm image mask", "glm image", lambda: glm_image() | dict(attention_mask=padding(3, length=7).long()), "attention_mask"),
    Case("chronoedit token timesteps", "chronoedit", lambda: wan_i2v(timestep=token_timesteps(1, 60))),
    Case("ltx 2 mask of keys batch 2", "ltx 2",
        lambda: ltx_2(2, video_self_attention_mask=(~padding(20, 50, length=60)).float()), "video_self_attention_mask"),
    Case("ltx 2 mask of keys", "ltx 2", lambda: ltx_2(video_self_attention_mask=(~padding(20, length=60))[:, None, None].float())),
    Case("pixart masks batch 2", "pixart",
        lambda: pixart(2, (4, 6)) | dict(attention_mask=~padding(9, 20, length=30)), "attention_mask"),
    # Biases of attention to text that differ between the tokens of the image.
    Case("pixart bias", "pixart", lambda: pixart() | dict(encoder_attention_mask=normal(1, 30, 7))),
    Case("allegro bias batch 2", "allegro", lambda: allegro(2, encoder_attention_mask=normal(2, 60, 7))),
    Case("allegro", "allegro", allegro, LTX_MASK),
    Case("allegro masks batch 2", "allegro", lambda: allegro(2, (5, 2), attention_mask=~padding(3, length=8)[:, None, :, None]
        .expand(2, 3, 8, 10)), "attention_mask"),
    Case("mochi", "mochi", lambda: mochi(4), LTX_MASK),
    Case("mochi batch 2", "mochi", lambda: mochi(5, 3), LTX_MASK),
    Case("mochi batch 3 one without text", "mochi", lambda: mochi(4, 0, 7), LTX_MASK),
    Case("mochi no text", "mochi", lambda: mochi(0)),
    Case("wan animate", "wan animate", wan_animate),
    Case("wan animate batch 2", "wan animate", lambda: wan_animate(2)),
    # A deprecated form, and what Flux 2 takes besides.
    Case("flux ids of a batch", "flux", lambda: flux(img_ids=grid(6, 5)[None], txt_ids=torch.zeros(1, 7, 3))),
    Case("ovis ids of a batch", "ovis", lambda: like_flux(2, img_ids=grid(6, 5)[None], txt_ids=torch.zeros(1, 7, 3))),
    Case("flux 2 ids of no batch", "flux 2", lambda: {**flux_2(), **{each: flux_2()[each][0] for each in ("img_ids", "txt_ids")}}),
]  # fmt: skip

# The ways to share a sequence, by what is exchanged; the ones that need a number of ranks with two factors come last.
MODES = ("ulysses", "ring alltoall", "ring allgather")
BATCH = "batch"  # items on other ranks: only where there are several
TWO_AXES = ("unified alltoall", "unified allgather")


def turns(case: Case, world: int) -> tuple[str, ...]:
    """The modes of a case on `world` ranks, by turns: on 2 and 3 ranks it runs in two of MODES, on 4 in one of TWO_AXES. Those of
    several items also run with the items divided, on 2 ranks.

    Half of the cases run on 3 ranks, and the other half on 4; in `make soak` all of them do.
    """
    turn = CASES.index(case)
    if world == 3 and turn % 2 == 0 and not SOAK:
        return ()
    if world == 4:
        return (TWO_AXES[turn // 2 % 2],) if SOAK or turn % 2 == 0 else ()
    return (MODES[(turn + world) % len(MODES)], *((BATCH,) if world == 2 and "batch" in case.name else ()))


def degrees(mode: str, world: int) -> dict[str, Any]:
    """Arguments of a config for `mode` on `world` ranks."""
    if mode == BATCH:
        return dict(batch_degree=world)
    kind, _, rotate = mode.partition(" ")
    shape = {"ulysses": (1, world), "ring": (world, 1), "unified": (world // 2, 2)}[kind]
    return dict(ring_degree=shape[0], ulysses_degree=shape[1], **({"rotate_method": rotate} if rotate else {}))


# Functions of diffusers_applying.py, diffusers_tokens.py and diffusers_checks.py.
CHECKS = (
    "applied_removed_applied", "configs", "meshes", "anything_off", "own_model", "own_model_marked_at_the_block", "out_of_reach",
    "text_left_out", "what_is_wrong_is_seen", "other_ways", "one_rank_alone", "other_inputs",
    "batch_axis", "batch_axis_alone", "pipeline", "pipeline_itself", "fsdp", "planned_modules_change",
)  # fmt: skip
# What is refused, and with which words, is the same on any number of ranks.
ON_TWO_RANKS = (
    "applied_twice", "degrees_that_do_not_fit", "wrong_plans", "gradients", "unknown_tokens", "not_gathered", "backends",
    "other_backends",
    "plans_that_say_too_little", "streams_in_no_order", "caches", "compiled", "errors_of_one_rank", "wrapped_before",
    "later_inputs", "weights_of_one_rank", "wrapped_forwards", "both_halves_cached", "left_out_on_purpose", "attended_another_way",
    "blocks_change_in_the_forward", "features_of_diffusers", "keys_and_values_kept", "more_messages_than_are_kept",
    "what_is_remembered", "layers_skipped_for_some_items", "errors_of_one_rank_between_blocks",
)  # fmt: skip
ON_TWO_AXES = ("configs", "meshes", "other_ways", "batch_axis", "batch_axis_alone", "fsdp")


def checks_on(world: int) -> tuple[str, ...]:
    """The checks that run on `world` ranks."""
    if world == 2:
        return CHECKS + ON_TWO_RANKS
    return CHECKS if SOAK else ON_TWO_AXES if world == 4 else ()
