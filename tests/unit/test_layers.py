"""The layers of docs/architecture.md: what each may import of the package, read off the imports."""

import ast

import pytest
from support.package import ROOT

BASE = {"errors", "compat", "nested", "version", "comfyui", "cache", "pinned", "recent", "words", "system"}
PARTS = {"engine/attention", "engine/weights"}
ENGINE = {*BASE, "engine", "engine/ranks", "engine/exchange", *PARTS}
BELOW_COMFY = {*ENGINE, "families", "vaes", "pool"}  # more of them for the side in ComfyUI's process
LAYERS = {
    **{part: set() for part in ("errors", "compat", "nested", "recent", "version", "comfyui", "words")},
    **{part: {"system"} for part in ("cache", "pinned", "system")},
    "engine/exchange": {*BASE, "engine/exchange"},
    "engine/ranks": {*BASE, "engine/ranks", "engine/exchange"},
    **{part: {*BASE, "engine/ranks", part} for part in PARTS},
    "engine": ENGINE,
    "diffusers": {*ENGINE, "diffusers"},
    "families": {*ENGINE, "families"},
    "vaes": {*ENGINE, "vaes"},
    "pool": {*ENGINE, "pool"},
    "timing": {*ENGINE, "timing"},
    "controller": {*ENGINE, "pool", "timing", "controller"},
    "comfy/shared": {*BELOW_COMFY, "comfy/shared"},
    "comfy/rank": {*BELOW_COMFY, "comfy/shared", "comfy/rank"},
    "comfy/ui": {*BELOW_COMFY, "timing", "controller", "comfy/shared", "comfy/ui"},
}
PACKAGE = ROOT / "cp_runtime"


def layer_of(parts):
    """Layer of a module, or of a name in one: the innermost folder that is one."""
    return next((layer for layer in ("/".join(parts[:2]), parts[0]) if layer in LAYERS), None)


def imports(file):
    """(parts of what is imported, from the package or not) of every import, those inside functions too."""
    here = file.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split("."), False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = here[: len(here) - node.level + 1] if node.level else ()
            module = [*around, *(node.module or "").split(".")] if node.module else list(around)
            yield from (([*module, alias.name], bool(node.level)) for alias in node.names)


FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if file.parent != PACKAGE or file.stem in BASE]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_layer(file):
    layer = layer_of(file.relative_to(PACKAGE).with_suffix("").parts)
    if layer is None:  # comfy/__init__.py
        assert not list(imports(file))
        return
    for parts, own in imports(file):
        if own:
            assert layer_of(parts) in LAYERS[layer], f"{layer} must not import {'.'.join(parts)}"
        elif parts[0].startswith(("comfy", "folder_paths", "server", "nodes", "execution")):
            assert layer.startswith("comfy/"), f"{layer} must not know ComfyUI: {'.'.join(parts)}"
