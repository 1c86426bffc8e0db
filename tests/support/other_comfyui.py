"""A second ComfyUI, as another computer has one: the same code, models and settings of its own."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from .package import ROOT

NO_PACKS: Mapping[str, Path] = MappingProxyType({})


def make_comfyui(folder: Path, comfyui: Path, models: Path | None = None, packs: Mapping[str, Path] = NO_PACKS) -> Path:
    """Make one in a new folder, and return the link to this pack in it.

    Args:
        models: in the layout of ComfyUI's; linked by its `extra_model_paths.yaml`.
        packs: other ones that it has, by name.
    """
    nodes = folder / "custom_nodes"
    nodes.mkdir(parents=True)
    for each in comfyui.iterdir():
        if each.name not in ("models", "custom_nodes", "extra_model_paths.yaml"):
            (folder / each.name).symlink_to(each)
    if models is not None:
        kinds = "".join(f"  {kind.name}: {kind.name}\n" for kind in models.iterdir() if kind.is_dir())
        (folder / "extra_model_paths.yaml").write_text(f"there:\n  base_path: {models}\n{kinds}")
    for name, pack in {"comfyui-context-parallel": ROOT, ROOT.name: ROOT, **packs}.items():
        (nodes / name).symlink_to(pack, target_is_directory=True)
    return nodes / "comfyui-context-parallel"
