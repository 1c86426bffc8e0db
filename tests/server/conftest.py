"""What tests on a server share."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import families
from support.faults import Faults
from support.server import CUSTOM_NODES, WAN_NODES, ComfyServer
from support.ssh import put_ssh

PREVIEWS = ("--preview-method", "latent2rgb")
OTHER_WEIGHT = "double_blocks.0.img_attn.qkv.weight"
INSIDE = "model.diffusion_model.conditioner."


@pytest.fixture(scope="session")
def pool_server(comfyui_path: Path, checkpoints_dir: Path, faults: Faults, hosts: dict[str, str]) -> Iterator[ComfyServer]:
    """A server whose workers are killed, stopped and restarted, which sends previews, and finds hosts."""
    nodes, env = CUSTOM_NODES | WAN_NODES, faults.environment | hosts
    with ComfyServer(comfyui_path, models=checkpoints_dir, custom_nodes=nodes, args=PREVIEWS, env=env) as running:
        yield running


@pytest.fixture(scope="session")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in for ssh."""
    return tmp_path_factory.mktemp("ssh")


@pytest.fixture(scope="session")
def hosts(comfyui_path: Path, checkpoints_dir: Path, ssh: Path) -> dict[str, str]:
    """Variables of a server that finds the stand-in for ssh. The host "filled" has a file of flux.safetensors' name, in which one
    weight is another one."""
    models = ssh / "models"
    (models / "diffusion_models").mkdir(parents=True)
    weights = load_file(checkpoints_dir / "diffusion_models" / "flux.safetensors")
    weights[OTHER_WEIGHT] += 1
    save_file(weights, models / "diffusion_models" / "flux.safetensors")
    return put_ssh(ssh, comfyui_path, models)


@pytest.fixture(scope="session")
def off_server(comfyui_path: Path, checkpoints_dir: Path, hosts: dict[str, str]) -> Iterator[ComfyServer]:
    """A server whose workers never start."""
    with ComfyServer(comfyui_path, models=checkpoints_dir, env=hosts) as running:
        yield running
        assert running.worker_pids() == []


@pytest.fixture(scope="module")
def info(server: ComfyServer) -> dict[str, Any]:
    """What the server says about nodes."""
    return server.object_info()


@pytest.fixture(scope="session")
def as_checkpoint(checkpoints_dir: Path) -> Callable[[str], None]:
    """Offers the model of a family, by its name, to Load Checkpoint, which looks into a folder of its own."""
    served = families.served()

    def link(name: str) -> None:
        _, entry, table = served[name]
        file = families.checkpoint_of(entry)
        source, target = (checkpoints_dir / folder / file for folder in ("diffusion_models", "checkpoints"))
        target.parent.mkdir(exist_ok=True)
        if target.exists():
            return
        if not table.conditioner:
            os.link(source, target)
            return
        # Checkpoints have these beside the model, not in it.
        with safe_open(source, "pt") as opened:
            tensors = {key.replace(INSIDE, "conditioner."): opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            save_file(tensors, target, metadata=opened.metadata())

    return link
