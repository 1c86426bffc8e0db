"""Stand-ins for encoders of any shape: what a VAE, a text, image or audio encoder would give a node, at random.

Nodes that make conditioning see only the numbers of an encoder, and its compression. Where a node needs more of one, there are
real ones in encoders.py.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.clip_vision
import comfy.model_patcher
import folder_paths
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional

from .conditioning import Random, TestConditioning
from .node import node


class Codec:
    """Stands for a `comfy.sd.VAE` that encodes: every patch of pixels becomes a latent pixel, by its mean and a random matrix.

    Args:
        space, time: pixels and frames to a latent pixel; the first frame stands alone. `time` 0 is a VAE of images.
    """

    def __init__(self, seed: int, channels: int, space: int, time: int) -> None:
        self.latent_channels, self.space, self.time = channels, space, time
        self.downscale_index_formula = (time, space, space)
        self.mix = Random(seed)(channels, 3)

    def spacial_compression_encode(self) -> int:
        return self.space

    spacial_compression_decode = spacial_compression_encode

    def encode(self, pixels: Tensor) -> Tensor:
        frames = functional.avg_pool2d(pixels[..., :3].movedim(-1, 1), self.space)
        # The pixels of TestImage have a standard deviation of 0.2.
        latent = torch.einsum("oc,fchw->fohw", self.mix, frames - 0.5) * self.space * 2.5
        if not self.time:
            return latent
        groups = [latent[:1], *latent[1 : 1 + (len(latent) - 1) // self.time * self.time].split(self.time)]
        return torch.stack([group.mean(0) for group in groups if len(group)], 1)[None]


@node("VAE")
def TestCodec(seed: int = 0, channels: int = 16, space: int = 8, time: int = 4) -> Codec:
    """A VAE of pixels, of any compression and number of channels."""
    return Codec(seed, channels, space, time)


class Fixed:
    """A VAE of sounds that gives the same latent for every sound."""

    audio_sample_rate = 16000

    def __init__(self, latent: Tensor) -> None:
        self.latent = latent

    def encode(self, waveform: Tensor) -> Tensor:
        return self.latent.clone()


@node("AUDIO", "VAE", "AUDIO_ENCODER_OUTPUT")
def TestSound(
    seed: int = 0, latent: str = "[1, 8, 4, 16]", features: str = "[2, 50, 32]", feature: str = "[1, 8, 35]", fps: float = 30.0
) -> tuple[Any, ...]:
    """A sound, a VAE for it, and what an encoder of sounds would have given.

    `latent` is the shape of the VAE's latent, `features` those of the encoder's layers: layers, steps, width. `feature` and
    `fps` make the output that WanDancer's encoder gives.
    """
    random = Random(seed)
    sound = {"waveform": random(1, 2, 1600), "sample_rate": Fixed.audio_sample_rate}
    vae = Fixed(random(*json.loads(latent)))
    layers, steps, width = json.loads(features)
    encoded = [random(1, steps, width) for _ in range(layers)]
    output = {
        "encoded_audio_all_layers": encoded,
        "encoded_audio": encoded[-1],
        "audio_samples": steps * 320,
        "audio_feature": random(*json.loads(feature)),
        "fps": fps,
    }
    return sound, vae, output


class Encoder:
    """Stands for a `comfy.sd.CLIP`: conditioning of a chosen shape, other numbers for every text."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def tokenize(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"text": repr([arg for arg in (*args, *kwargs.values()) if isinstance(arg, str | int | float)])}

    def encode_from_tokens_scheduled(self, tokens: dict[str, Any]) -> list[Any]:
        seed = int.from_bytes(tokens["text"].encode(), "little") % 1000003
        return TestConditioning.function(seed=seed, **self.settings)


@node("CLIP")
def TestEncoder(tokens: int = 12, width: int = 64, extra: str = "{}") -> Encoder:
    """A text encoder that gives what TestConditioning gives."""
    return Encoder(tokens=tokens, width=width, extra=extra)


class Vision:
    """Stands for a `comfy.clip_vision.ClipVisionModel`."""

    load_device = torch.device("cpu")

    def __init__(self, output: comfy.clip_vision.Output) -> None:
        self.output, self.model = output, _Constant(output.last_hidden_state)
        self.patcher = comfy.model_patcher.ModelPatcher(self.model, self.load_device, self.load_device)

    def encode_image(self, image: Tensor, crop: bool = True) -> comfy.clip_vision.Output:
        return self.output


class _Constant(torch.nn.Module):
    def __init__(self, hidden_states: Tensor) -> None:
        super().__init__()
        self.hidden_states = hidden_states

    def forward(self, pixel_values: Tensor) -> tuple[Tensor]:
        return (self.hidden_states,)


@node("CLIP_VISION_OUTPUT", "CLIP_VISION")
def TestVision(seed: int = 0, tokens: int = 257, width: int = 1280) -> tuple[Any, ...]:
    """An image encoder, and what it gives for every image: `tokens` of a `width`, and one embedding of that width."""
    random, output = Random(seed), comfy.clip_vision.Output()
    output.last_hidden_state = output.penultimate_hidden_states = random(1, tokens, width)
    output.image_embeds = random(1, width)
    return output, Vision(output)


@node("VAE")
def TestSplats() -> Any:
    """A decoder of splats that knows its sizes and decodes nothing."""
    sizes = SimpleNamespace(gaussians_per_point=32, gs=SimpleNamespace(model_channels=64))
    return SimpleNamespace(first_stage_model=sizes, vae_dtype=torch.float32)


@node(model_patch="MODEL_PATCH")
def TestSaveModelPatch(model_patch: Any, name: str = "patch.safetensors") -> dict[str, Any]:
    """Write a model patch into a file of the folder `model_patches`, for Load Model Patch."""
    folder = Path(folder_paths.get_folder_paths("model_patches")[0])
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file({k: v.contiguous() for k, v in model_patch.model.state_dict().items()}, folder / name)
    return {"ui": {}}
