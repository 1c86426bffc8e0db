"""A second ComfyUI, as another computer has one: the same code, models and settings of its own."""

from pathlib import Path

from .package import ROOT


def make_comfyui(folder: Path, comfyui: Path, models: Path | None = None) -> Path:
    """Make one in a new folder, and return the link to this pack in it. `models`: in the layout of ComfyUI's; linked by its
    `extra_model_paths.yaml`."""
    nodes = folder / "custom_nodes"
    nodes.mkdir(parents=True)
    for each in comfyui.iterdir():
        if each.name not in ("models", "custom_nodes", "extra_model_paths.yaml"):
            (folder / each.name).symlink_to(each)
    if models is not None:
        kinds = "".join(f"  {kind.name}: {kind.name}\n" for kind in models.iterdir() if kind.is_dir())
        (folder / "extra_model_paths.yaml").write_text(f"there:\n  base_path: {models}\n{kinds}")
    for name in {"comfyui-context-parallel", ROOT.name}:
        (nodes / name).symlink_to(ROOT, target_is_directory=True)
    return nodes / "comfyui-context-parallel"
