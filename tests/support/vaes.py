"""Tiny VAEs of every kind that has a plan, made of ComfyUI's own classes with seeded weights; and files of VAEs that ComfyUI loads.

    python -m support.vaes MODELS_DIR [NAME…]

Needs ComfyUI.
"""

import importlib
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
WAN = {
    "dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "attn_scales": [], "temperal_downsample": [True, True],
    "dropout": 0.0,
}  # fmt: skip
LTXV: dict[str, Any] = {
    "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128, "norm_layer": "pixel_norm", "patch_size": 2,
    "latent_log_var": "uniform", "causal_decoder": False, "encoder_base_channels": 16, "decoder_base_channels": 16,
    "encoder_blocks": [["res_x", {"num_layers": 1}], ["compress_all_res", {"multiplier": 2}], ["res_x", {"num_layers": 1}]],
    "decoder_blocks": [["res_x", {"num_layers": 1}], ["compress_all", {"residual": True, "multiplier": 2}],
                       ["res_x", {"num_layers": 1}]],
}  # fmt: skip


@dataclass(frozen=True)
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


def _made(path: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """What makes a VAE of a class of `comfy`, which is not imported before."""
    module, _, cls = path.rpartition(".")
    return lambda: getattr(importlib.import_module(f"comfy.{module}"), cls)(*args, **kwargs)


def _legacy(**more: Any) -> Callable[[], nn.Module]:
    config = IMAGE | more
    return _made("ldm.models.autoencoder.AutoencoderKL", ddconfig=config, embed_dim=config["z_channels"])


def _engine(module: str, config: dict[str, Any], regularizer: str = "DiagonalGaussianRegularizer") -> Callable[[], nn.Module]:
    return _made(
        "ldm.models.autoencoder.AutoencodingEngine",
        regularizer_config={"target": f"comfy.ldm.models.autoencoder.{regularizer}"},
        encoder_config={"target": f"comfy.ldm.{module}.Encoder", "params": config},
        decoder_config={"target": f"comfy.ldm.{module}.Decoder", "params": config},
    )


PLAIN, REFINER = "modules.diffusionmodules.model", "hunyuan_video.vae_refiner"
WAN_VAE, VIDEO_VAE = "ldm.wan.vae.WanVAE", "ldm.lightricks.vae.causal_video_autoencoder.VideoVAE"


TINY_VAES = {
    "SD": TinyVAE(_legacy(), 4, 4),
    "Flux": TinyVAE(_engine(PLAIN, IMAGE), 4, 4),
    "Flux 2": TinyVAE(_legacy(batch_norm_latent=True), 16, 8),
    "HunyuanImage": TinyVAE(_engine("hunyuan_video.vae", REFINED), 16, 4),
    "HunyuanVideo": TinyVAE(_legacy(conv3d=True, time_compress=2), 4, 4, (1, 3), 2),
    "HunyuanVideo refined": TinyVAE(_engine(REFINER, REFINED | {"refiner_vae": True}, "EmptyRegularizer"), 16, 4, (1, 3), 2),
    "HunyuanImage refined": TinyVAE(_engine(REFINER, REFINED | {"refiner_vae": False}), 16, 4, (1,), 2),
    "Wan 2.1": TinyVAE(_made(WAN_VAE, **WAN), 4, 4, (1, 4), 4),
    "Wan 2.2": TinyVAE(_made("ldm.wan.vae2_2.WanVAE", **WAN, dec_dim=8), 4, 8, (1, 3), 4),
    "LTXV": TinyVAE(_made(VIDEO_VAE, config=LTXV | {"spatial_padding_mode": "zeros"}), 128, 4, (1, 3), 2),
    "LTXV reflecting": TinyVAE(_made(VIDEO_VAE, config=LTXV | {"spatial_padding_mode": "reflect"}), 128, 4, (3,), 2),
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


NOISE_FILE = LTXV_FILE | {"decoder_blocks": [*LTXV_FILE["decoder_blocks"][:-1], ["res_x", {"num_layers": 1, "inject_noise": True}]]}
"""It draws noise while it decodes."""
CONFIGS = {"ltxv": LTXV_FILE, "ltxv_noise": NOISE_FILE}


FILES = {
    "wan": _made(WAN_VAE, **WAN_FILE),
    "ltxv": _made(VIDEO_VAE, config=LTXV_FILE),
    "ltxv_noise": _made(VIDEO_VAE, config=NOISE_FILE),
    "kl": _legacy(**KL_FILE),
    "taesd": _made("taesd.taesd.TAESD", latent_channels=4),
    "taehv": _made("taesd.taehv.TAEHV", latent_channels=16),
}
FULL = {"full_flux": _engine(PLAIN, KL_FILE | {"ch": 128, "z_channels": 16}), "full_wan": _made(WAN_VAE, **WAN_FILE | {"dim": 96})}
"""Of the width that is published, for measurements."""
MORE = {"sd3_kl": _legacy(**KL_FILE | {"z_channels": 16})}
"""For `make play`."""


def write(models: str, *names: str) -> None:
    """Write files into the folder `vae` of a ComfyUI models folder: by default those of FILES."""
    out = Path(models) / "vae"
    out.mkdir(exist_ok=True)
    for name in names or FILES:
        make = (FILES | FULL | MORE)[name]
        tensors = build(TinyVAE(make=make, channels=4, ratio=8)).state_dict()
        metadata = {"config": json.dumps({"vae": CONFIGS[name]})} if name in CONFIGS else None
        kept = {
            key: value.contiguous() for key, value in tensors.items() if not name.endswith("kl") or not key.startswith("encoder.")
        }
        save_file(kept, out / f"{name}_vae.safetensors", metadata)


if __name__ == "__main__":
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    write(*sys.argv[1:])
