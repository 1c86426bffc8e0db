"""What the coverage report knows about files and node classes: tables, to be read and changed by hand."""

from __future__ import annotations

import re

FAMILIES = {
    # Wan: those with a transformer class of their own first, then everything that is a WanModel.
    r"wan.*vace": "Wan VACE",
    r"wan.*fun_camera": "Wan Camera",
    r"wan.*SCAIL_2": "Wan SCAIL 2",
    r"wan.*SCAIL": "Wan SCAIL",
    r"wan.*s2v": "Wan S2V",
    r"wan.*animate_?2": "Wan-Animate 2",
    r"wan.*animate": "Wan Animate",
    r"wan.*dancer": "Wan Dancer",
    r"humo": "Wan HuMo",
    r"causal_forcing": "Wan AR",
    r"wan2|chrono_edit": "Wan",  # also Fun, FLF, ATI, Move, Bernini: other inputs of the same class
    # Flux and its relatives
    r"flux-?2": "Flux 2",
    r"chroma-radiance": "Chroma Radiance",
    r"chroma": "Chroma",
    r"^pid_": "PiD",  # pid_flux1 works on latents of Flux and is no Flux
    r"ovis_image": "Ovis-Image",
    r"longcat_image": "LongCat-Image",
    r"flux\.?1": "Flux",
    # others, by name
    r"qwen_image_2\.1": "Qwen-Image 2.1",
    r"qwen_image|firered-image": "Qwen-Image",
    r"z_image": "Z-Image",
    r"netayume": "Lumina 2",
    r"newbie": "NewBie",
    r"hunyuanvideo1\.5|capybara": "HunyuanVideo 1.5",
    r"hunyuan_video": "HunyuanVideo",
    r"hunyuanimage": "HunyuanImage 2.1",
    r"hunyuan_?3d.*2\.1": "Hunyuan3D 2.1",
    r"hunyuan3d": "Hunyuan3D 2",
    r"ltx-2\.5": "LTX-2.5",
    r"ltx-2": "LTX-2",
    r"ltx-video": "LTXV",
    r"sd3": "SD3",
    r"hidream_o1": "HiDream-O1",
    r"hidream_(i1|e1)": "HiDream-I1",
    r"anima": "Anima",
    r"cosmos_predict2": "Cosmos-Predict2",
    r"cosmos": "Cosmos",
    r"mochi": "Mochi",
    r"aura_?flow": "AuraFlow",
    r"pixart": "PixArt",
    r"pixeldit": "PixelDiT",
    r"omnigen2": "OmniGen2",
    r"boogu": "Boogu",
    r"krea2": "Krea 2",
    r"ideogram4": "Ideogram 4",
    r"kandinsky5": "Kandinsky 5",
    r"lens_": "Lens",
    r"mage_flow": "MageFlow",
    r"joyai_image": "JoyImage",
    r"void_pass": "CogVideoX",  # VOID is a CogVideoX that inpaints
    r"ernie-image": "ERNIE-Image",
    r"stable[-_]audio": "Stable Audio",
    r"ace_?step_?v?1\.5": "ACE-Step 1.5",
    r"ace_?step": "ACE-Step",
    r"minimax_h3|fasth3": "MiniMax-H3",
    r"minimax_music3": "MiniMax Music 3",
    r"seedvr2": "SeedVR2",
    r"triposplat": "TripoSplat",
    r"svd": "SVD",
    r"sd_xl_refiner": "SDXL refiner",
    r"sd_?xl": "SDXL",
    r"flux3": "FLUX.3 Klein",
    r"moss_image": "MOSS-Image",
    r"ming_image": "Ming-Image",
    r"fibo2": "Fibo 2",
    r"yue2": "YuE2",
    r"pixal3d": "Pixal3D",
    r"trellis_2": "Trellis 2",
    r"lotus": "SD2",  # its U-Net, with depth for an output
    r"v1-5|dreamshaper": "SD1.5",
}
"""Family by file name, the first that is found in it. Families differ where ComfyUI's transformer classes do, or their layers."""

WEIGHTS = {
    r"int8[_-]convrot": "int8 convrot",
    r"fp8_e4m3fn_scaled|fp8_?scaled|fp8mixed": "fp8 scaled",
    r"fp8_e4m3fn|flux1-(dev|schnell)-fp8|hidream_i1_\w+_fp8": "fp8",
    r"fp8": "fp8 scaled",  # what publishers call plainly fp8 holds scales by now, older files do not
    r"bf16": "bf16",
    r"fp16": "fp16",
}
"""Kind of weights by file name."""

QUANTISED = frozenset({"fp8", "fp8 scaled", "int8 convrot"})
"""Kinds that have code of their own on the workers, so that a test has to show them."""

VALUES_ONLY = {
    r"Reroute|PrimitiveNode": "wiring of the browser; the queue never sees it",
    r"CLIPTextEncode(Flux)?": "a text's tokens and pooled vector, and guidance, which TestConditioning gives with other numbers",
    r"Empty.*Latent.*|LTXVEmptyLatentAudio": "zeros, in the shape that the tests of the family have",
    r"VAEEncode\w*|LTXVAudioVAEEncode": "numbers of a latent, whose shape is the sampler's",
    r"LatentConcat|\w+LatentUpsampler|\w+LatentUpscaleWithModel|LTXVSeparateAVLatent|SeedVR2TemporalChunk|VOIDWarpedNoise": (
        "a tensor made from tensors between two samplings"
    ),
    r"ConditioningLoader": "a conditioning from a file, as an encoder makes it",
    r"KSamplerSelect": "the name of a sampler; samplers see one denoised latent per call, whoever computes it",
}
"""Node classes that change nothing but numbers in what arrives at the forward, and so need no test of their own. Keep it short."""

UNPLANNED = frozenset({"FLUX.3 Klein", "MOSS-Image", "Fibo 2"})
"""Families whose classes were not to be had."""

STAND_INS = frozenset({"Qwen-Image 2.1", "YuE2"})
"""Families whose plan was compared on a stand-in of their class (tests/support/next_classes), as no tested version has it."""

REFUSED: dict[str, str] = {
    "FluxKVCache": "keys and values of earlier steps are kept inside the transformer",
    "SamplerARVideo": "keys and values of earlier frames are kept inside the transformer",
}
"""Node classes and families that are refused, with the reason. A server test must show it: `main` checks that one did."""


def family(file: str) -> str:
    return _first(FAMILIES, file, default="unknown")


def weights(file: str, weight_dtype: str) -> str:
    """Kind of weights a loader gives: those of the file, unless it casts them."""
    if weight_dtype.startswith("fp8"):
        return "fp8"
    return _first(WEIGHTS, file, default="unnamed")


def matters(node_class: str) -> bool:
    return not any(re.fullmatch(pattern, node_class) for pattern in VALUES_ONLY)


def slug(name: str) -> str:
    """A name without its spelling: tests call "HunyuanVideo 1.5" hunyuan_video_15."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _first(table: dict[str, str], text: str, *, default: str) -> str:
    return next((value for pattern, value in table.items() if re.search(pattern, text, re.IGNORECASE)), default)
