"""Fixtures for hostile files and workflows."""

from __future__ import annotations

import os
import shutil

import pytest
from support.server import ComfyServer


@pytest.fixture(scope="module")
def shelf(checkpoints_dir, tmp_path_factory):
    """A folder of models, with the same readable model file inside of it and in several places outside."""
    base = tmp_path_factory.mktemp("shelf")
    inside = base / "models" / "diffusion_models"
    for folder in (inside, base / "models" / "checkpoints", base / "models" / "diffusion_models2", base / "elsewhere" / "sub"):
        folder.mkdir(parents=True)
    source = checkpoints_dir / "diffusion_models" / "flux.safetensors"
    shutil.copy(source, inside / "flux.safetensors")
    for place in (base, base / "models", base / "models" / "diffusion_models2", base / "elsewhere", base / "elsewhere" / "sub"):
        os.link(inside / "flux.safetensors", place / "secret.safetensors")
    (inside / "link").symlink_to(base / "elsewhere" / "sub", target_is_directory=True)
    return base


@pytest.fixture(scope="module")
def graph_server(comfyui_path, shelf):
    """A server for hostile workflows; the workers start with the first good one."""
    with ComfyServer(comfyui_path, models=shelf / "models") as running:
        yield running
