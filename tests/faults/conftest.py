"""Fixtures of the fault suite."""

import shutil

import pytest
from support.faults import Faults
from support.graphs import flux_prompt
from support.server import CUSTOM_NODES, ComfyServer


@pytest.fixture
def start_faults(tmp_path, monkeypatch):
    """Faults for the ranks of this process's own pools."""
    faults = Faults(tmp_path)
    for name, value in faults.pool_environment.items():
        monkeypatch.setenv(name, value)
    return faults


@pytest.fixture(autouse=True)
def no_fault_is_left(faults):
    """What a test has armed strikes in no other."""
    yield
    faults.clear()


SAY_WHO = """
import os
with open({file!r}, "a") as out:
    out.write(f"{what} {{os.getpid()}}\\n")
NODE_CLASS_MAPPINGS = {{}}
"""


@pytest.fixture(scope="session")
def other_pack(tmp_path_factory):
    """A pack that writes into its file `said` which processes run its code."""
    pack = tmp_path_factory.mktemp("another_pack")
    for name, what in (("prestartup_script", "prestartup"), ("__init__", "import")):
        (pack / f"{name}.py").write_text(SAY_WHO.format(file=str(pack / "said"), what=what))
    return pack


@pytest.fixture(scope="session")
def fault_server(comfyui_path, checkpoints_dir, faults, other_pack):
    """A server whose workers look for faults."""
    nodes = {**CUSTOM_NODES, "another-pack": other_pack}
    with ComfyServer(comfyui_path, models=checkpoints_dir, custom_nodes=nodes, env=faults.environment) as running:
        yield running


@pytest.fixture(scope="session")
def expected(fault_server):
    """The stock latent."""
    return fault_server.sample(flux_prompt())


@pytest.fixture
def temp(tmp_path):
    """An empty folder for temporary files."""
    (tmp_path / "temp").mkdir()
    return tmp_path / "temp"


@pytest.fixture(scope="session")
def shelf(checkpoints_dir, tmp_path_factory):
    """A folder of models."""
    base = tmp_path_factory.mktemp("shelf")
    for folder in ("diffusion_models", "checkpoints", "loras"):
        (base / "models" / folder).mkdir(parents=True)
    shutil.copy(checkpoints_dir / "diffusion_models" / "flux.safetensors", base / "models" / "diffusion_models")
    return base


@pytest.fixture(scope="session")
def graph_server(comfyui_path, shelf):
    """A server for hostile workflows; the workers start with the first good one."""
    with ComfyServer(comfyui_path, models=shelf / "models") as running:
        yield running
