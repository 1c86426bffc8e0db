"""CP VAE Decode and CP VAE Encode: ComfyUI's VAE nodes, with their work on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfy_api.latest import io

from ..cp_runtime.comfy.ui.vae import AUTO, MODES, run_vae
from ..cp_runtime.pool.config import RuntimeConfig
from .config import ALIASES, CATEGORY, CPConfigType

MAX_TILE = 4096  # as in ComfyUI's tiled nodes


def _inputs(first: Any, doing: str, least_step: int) -> list[Any]:
    return [
        first,
        io.Vae.Input("vae", tooltip="A VAE from Load VAE or Load Checkpoint. Every rank loads the same file."),
        io.Combo.Input(
            "mode",
            options=list(MODES),
            default=AUTO,
            tooltip=f"exact: the rows of every picture are split over the ranks, which exchange the rows at the borders. The "
            f"result is that of VAE {doing}, and each rank needs only a part of the memory. tiles: each rank takes whole tiles; "
            f"the result is that of VAE {doing} (Tiled). auto = exact if there is a plan for the VAE, otherwise tiles.",
        ),
        CPConfigType.Input(
            "cp_config",
            optional=True,
            tooltip="From CP Config. Without it, the node runs on the ranks that already sample, or on all devices.",
        ),
        _tiles("tile_size", 512, 64, least_step, "rows and columns of a tile, in pixels. Smaller tiles need less memory but show "
               "their borders more."),
        _tiles("overlap", 64, 0, 32, "pixels by which neighbouring tiles overlap. More overlap hides borders better but costs "
               "time."),
        _tiles("temporal_size", 64, 8, 4, "frames of a tile.", "Mode tiles, videos"),
        _tiles("temporal_overlap", 8, 4, 4, "frames by which neighbouring tiles overlap.", "Mode tiles, videos"),
    ]  # fmt: skip


def _tiles(name: str, default: int, least: int, step: int, tooltip: str, where: str = "Mode tiles") -> Any:
    return io.Int.Input(
        name, default=default, min=least, max=MAX_TILE, step=step, optional=True, advanced=True, tooltip=f"{where}: {tooltip}"
    )


def _run(
    stock: Callable[..., Any],
    tiled: Callable[..., Any],
    given: Any,
    vae: Any,
    mode: str,
    cp_config: RuntimeConfig | None = None,
    tile_size: int = 512,
    overlap: int = 64,
    temporal_size: int = 64,
    temporal_overlap: int = 8,
) -> io.NodeOutput:
    """Run ComfyUI's node, `stock` or `tiled`, with the VAE of the ranks. `given`: its input."""
    sizes = tile_size, overlap, temporal_size, temporal_overlap
    return io.NodeOutput(
        run_vae(
            vae,
            cp_config,
            mode,
            lambda each: stock(each, given)[0],
            lambda each: tiled(each, given, *sizes)[0],
            stock.__name__ == "decode",
        )
    )


class CPVAEDecode(io.ComfyNode):
    """VAE Decode and VAE Decode (Tiled) on all ranks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPVAEDecode",
            display_name="CP VAE Decode",
            category=CATEGORY,
            search_aliases=[*ALIASES, "vae decode", "decode latent", "tiled decode", "vae that decodes faster"],
            description="VAE Decode on several devices together, with the same picture. Use it instead of VAE Decode or VAE Decode "
            "(Tiled). Decoding takes about 1/N of the time and, in mode exact, of the memory.",
            inputs=_inputs(io.Latent.Input("samples", tooltip="The latent to decode."), "Decode", 32),
            outputs=[io.Image.Output(tooltip="The picture, or the frames of the video.")],
        )

    @classmethod
    def execute(cls, samples: Any, **inputs: Any) -> io.NodeOutput:
        from nodes import VAEDecode, VAEDecodeTiled  # ComfyUI's module of that name

        return _run(VAEDecode().decode, VAEDecodeTiled().decode, samples, **inputs)


class CPVAEEncode(io.ComfyNode):
    """VAE Encode and VAE Encode (Tiled) on all ranks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPVAEEncode",
            display_name="CP VAE Encode",
            category=CATEGORY,
            search_aliases=[*ALIASES, "vae encode", "encode image", "image to latent", "tiled encode"],
            description="VAE Encode on several devices together, with the same latent. Use it instead of VAE Encode or VAE Encode "
            "(Tiled).",
            inputs=_inputs(io.Image.Input("pixels", tooltip="The picture, or the frames of a video, to encode."), "Encode", 64),
            outputs=[io.Latent.Output(tooltip="The latent.")],
        )

    @classmethod
    def execute(cls, pixels: Any, **inputs: Any) -> io.NodeOutput:
        from nodes import VAEEncode, VAEEncodeTiled  # ComfyUI's module of that name

        return _run(VAEEncode().encode, VAEEncodeTiled().encode, pixels, **inputs)
