"""Tiny VAEs of every kind that has a plan, made of ComfyUI's own classes with seeded weights; and files of VAEs that ComfyUI loads.

    python -m support.vaes MODELS_DIR [NAME…]

Needs ComfyUI.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

IMAGE = {
    "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32, "ch_mult": [1, 2, 2],
    "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
REFINED = {
    "block_out_channels": [32, 64, 64], "in_channels": 3, "out_channels": 3, "num_res_blocks": 1, "ffactor_spatial": 4,
    "ffactor_temporal": 2, "downsample_match_channel": True, "upsample_match_channel": True, "z_channels": 16,
}  # fmt: skip
HUNYUAN_IMAGE = REFINED | {"z_channels": 16}
WAN = {
    "dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "attn_scales": [], "temperal_downsample": [True, True],
    "dropout": 0.0,
}  # fmt: skip
LTXV = {
    "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128, "norm_layer": "pixel_norm", "patch_size": 2,
    "latent_log_var": "uniform", "causal_decoder": False, "encoder_base_channels": 16, "decoder_base_channels": 16,
    "encoder_blocks": [["res_x", {"num_layers": 1}], ["compress_all_res", {"multiplier": 2}], ["res_x", {"num_layers": 1}]],
    "decoder_blocks": [["res_x", {"num_layers": 1}], ["compress_all", {"residual": True, "multiplier": 2}],
                       ["res_x", {"num_layers": 1}]],
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TinyVAE:
    """A VAE and what it is called with.

    Args:
        make: builds it.
        channels: of its latent.
        ratio: rows and columns of the picture for each of the latent.
        frames: of the latents that it is tried with; none = pictures.
        compression: frames of the video, but the first, for each of the latent.
    """

    make: Callable[[], nn.Module]
    channels: int
    ratio: int
    frames: tuple[int, ...] = ()
    compression: int = 1


def build(vae: TinyVAE, seed: int = 1) -> nn.Module:
    """Build it and draw its weights: convolutions keep the variance, norms are around one."""
    with torch.no_grad():
        model = vae.make().eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point():
                continue
            drawn = torch.randn(tensor.shape, generator=generator)
            if name.endswith(("running_var", "std-of-means")):
                tensor.copy_(1 + 0.1 * drawn.abs())
            elif name.endswith(("running_mean", "mean-of-means", "bias")):
                tensor.copy_(0.1 * drawn)
            elif tensor.ndim > 2 and not name.endswith("gamma"):
                tensor.copy_(drawn / tensor[0].numel() ** 0.5)
            elif not name.endswith("scale_shift_table"):
                tensor.copy_(1 + 0.2 * drawn)
        return model


def _legacy(**more: Any) -> nn.Module:
    from comfy.ldm.models.autoencoder import AutoencoderKL

    config = IMAGE | more
    return AutoencoderKL(ddconfig=config, embed_dim=config["z_channels"])


def _engine(encoder: str, decoder: str, config: dict[str, Any], regularizer: str = "DiagonalGaussianRegularizer") -> nn.Module:
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    return AutoencodingEngine(
        regularizer_config={"target": f"comfy.ldm.models.autoencoder.{regularizer}"},
        encoder_config={"target": encoder, "params": config},
        decoder_config={"target": decoder, "params": config},
    )


def _plain() -> nn.Module:
    module = "comfy.ldm.modules.diffusionmodules.model"
    return _engine(f"{module}.Encoder", f"{module}.Decoder", IMAGE)


def _hunyuan_image() -> nn.Module:
    return _engine("comfy.ldm.hunyuan_video.vae.Encoder", "comfy.ldm.hunyuan_video.vae.Decoder", HUNYUAN_IMAGE)


def _refiner(refiner: bool) -> nn.Module:
    module = "comfy.ldm.hunyuan_video.vae_refiner"
    regularizer = "EmptyRegularizer" if refiner else "DiagonalGaussianRegularizer"
    return _engine(f"{module}.Encoder", f"{module}.Decoder", REFINED | {"refiner_vae": refiner}, regularizer)


def _wan() -> nn.Module:
    from comfy.ldm.wan.vae import WanVAE

    return WanVAE(**WAN)


def _wan22() -> nn.Module:
    from comfy.ldm.wan.vae2_2 import WanVAE

    return WanVAE(**WAN, dec_dim=8)


def _ltxv(padding: str) -> nn.Module:
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return VideoVAE(config=LTXV | {"spatial_padding_mode": padding})


TINY_VAES = {
    "SD": TinyVAE(make=_legacy, channels=4, ratio=4),
    "Flux": TinyVAE(make=_plain, channels=4, ratio=4),
    "Flux 2": TinyVAE(make=lambda: _legacy(batch_norm_latent=True), channels=16, ratio=8),
    "HunyuanImage": TinyVAE(make=_hunyuan_image, channels=16, ratio=4),
    "HunyuanVideo": TinyVAE(make=lambda: _legacy(conv3d=True, time_compress=2), channels=4, ratio=4, frames=(1, 3), compression=2),
    "HunyuanVideo refined": TinyVAE(make=lambda: _refiner(True), channels=16, ratio=4, frames=(1, 3), compression=2),
    "HunyuanImage refined": TinyVAE(make=lambda: _refiner(False), channels=16, ratio=4, frames=(1,), compression=2),
    "Wan 2.1": TinyVAE(make=_wan, channels=4, ratio=4, frames=(1, 4), compression=4),
    "Wan 2.2": TinyVAE(make=_wan22, channels=4, ratio=8, frames=(1, 3), compression=4),
    "LTXV": TinyVAE(make=lambda: _ltxv("zeros"), channels=128, ratio=4, frames=(1, 3), compression=2),
    "LTXV reflecting": TinyVAE(make=lambda: _ltxv("reflect"), channels=128, ratio=4, frames=(3,), compression=2),
}


# --- files ----------------------------------------------------------------------------------------------------------------------

WAN_FILE = {
    "dim": 8, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [],
    "temperal_downsample": [False, True, True], "dropout": 0.0,
}  # fmt: skip
"""What ComfyUI's detection leaves free of Wan 2.1's VAE is `dim`."""
LTXV_FILE = LTXV | {
    "patch_size": 4, "encoder_base_channels": 8, "decoder_base_channels": 8, "spatial_padding_mode": "zeros",
    "encoder_blocks": [["res_x", {"num_layers": 1}], *[["compress_all_res", {"multiplier": 2}]] * 3],
    "decoder_blocks": [*[["compress_all", {"residual": True, "multiplier": 2}]] * 3, ["res_x", {"num_layers": 1}]],
}  # fmt: skip
"""The file brings all of it, but for the 32 pixels and 8 frames for each of the latent."""
KL_FILE = IMAGE | {"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2}
"""Of the image VAEs, only the decoder can be small: a file without an encoder."""


def _wan_file() -> nn.Module:
    from comfy.ldm.wan.vae import WanVAE

    return WanVAE(**WAN_FILE)


def _ltxv_file() -> nn.Module:
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return VideoVAE(config=LTXV_FILE)


def _full_flux() -> nn.Module:
    module = "comfy.ldm.modules.diffusionmodules.model"
    config = KL_FILE | {"ch": 128, "z_channels": 16}
    return _engine(f"{module}.Encoder", f"{module}.Decoder", config)


def _full_wan() -> nn.Module:
    from comfy.ldm.wan.vae import WanVAE

    return WanVAE(**WAN_FILE | {"dim": 96})


def _tiny_image() -> nn.Module:
    from comfy.taesd.taesd import TAESD

    return TAESD(latent_channels=4)


def _tiny_video() -> nn.Module:
    from comfy.taesd.taehv import TAEHV

    return TAEHV(latent_channels=16)


FILES: dict[str, Callable[[], nn.Module]] = {
    "wan": _wan_file,
    "ltxv": _ltxv_file,
    "kl": lambda: _legacy(**KL_FILE),
    "taesd": _tiny_image,
    "taehv": _tiny_video,
}


FULL: dict[str, Callable[[], nn.Module]] = {"full_flux": _full_flux, "full_wan": _full_wan}
"""Of the width that is published, for measurements."""

MORE: dict[str, Callable[[], nn.Module]] = {"sd3_kl": lambda: _legacy(**KL_FILE | {"z_channels": 16})}
"""For `make play`."""


def write(models: str, *names: str) -> None:
    """Write files into the folder `vae` of a ComfyUI models folder: by default those of FILES."""
    out = Path(models) / "vae"
    out.mkdir(exist_ok=True)
    for name in names or FILES:
        make = (FILES | FULL | MORE)[name]
        tensors = build(TinyVAE(make=make, channels=4, ratio=8)).state_dict()
        metadata = {"config": json.dumps({"vae": LTXV_FILE})} if name == "ltxv" else None
        kept = {
            key: value.contiguous() for key, value in tensors.items() if not name.endswith("kl") or not key.startswith("encoder.")
        }
        save_file(kept, out / f"{name}_vae.safetensors", metadata)


if __name__ == "__main__":
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    write(*sys.argv[1:])
