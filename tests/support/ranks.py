"""Runs a script as N real ranks over gloo and collects the lines that rank 0 prints.

A rank script is called as `script.py <rank> <world> <rendezvous file> [arguments]`. It calls `start()` first and `finish()` last,
and prints one JSON object per line with `report()`. Ranks are forked from a process that has imported torch, and what else a test
names, once for all runs (`rank_server.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import preloaded, stand_in

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
DEVICE, BACKEND = "CP_TEST_DEVICE", "CP_TEST_BACKEND"
COMFY = ("comfy.sd", "support.models", "family_stock")
DIFFUSERS = ("diffusers_checks", "diffusers_stock")
"""What scripts with ComfyUI or diffusers have imported for them."""

_servers: dict[tuple[str, ...], _Server] = {}


def run_ranks(
    script: Path,
    world: int,
    *arguments: str,
    timeout: float = 240,
    preload: tuple[str, ...] = (),
    prepare: Any = None,
    device: str = "cpu",
    backend: str = "gloo",
) -> list[dict[str, Any]]:
    """Run `script` on `world` ranks; return the reports. Raises AssertionError with the output of all ranks on failure.

    Args:
        preload: modules that the script imports and that are worth importing once.
        prepare: given to the function `prepare` of the last of these modules before the ranks start.
        device: what `own_device` returns in every rank; "cuda" is a GPU for each.
        backend: of the group of all ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank{rank}" for rank in range(world)]
        for file in outputs:
            file.touch()
        request = {
            "script": str(script),
            "store": str(Path(folder) / "store"),
            "arguments": arguments,
            "prepare": prepare,
            "environment": {**os.environ, **ENVIRONMENT, DEVICE: device, BACKEND: backend},
            "outputs": list(map(str, outputs)),
        }
        codes = _ask(preload, request, timeout)
        texts = [file.read_text(errors="replace") for file in outputs]
    assert codes == [0] * world, "\n".join(f"--- rank {rank}\n{text[-4000:]}" for rank, text in enumerate(texts))
    return [json.loads(line[1:]) for line in texts[0].splitlines() if line.startswith("@")]


def _ask(preload: tuple[str, ...], request: dict[str, Any], timeout: float) -> list[int] | None:
    """The exit codes of one run; None where it took too long or the server ended."""
    server = _servers.get(preload)
    if server is None or server.process.poll() is not None:
        server = _servers[preload] = _Server(preload)
    with contextlib.suppress(BrokenPipeError):
        server.requests.write(json.dumps(request) + "\n")
        server.requests.flush()
        if select.select([server.answers], [], [], timeout)[0] and (answer := server.answers.readline()):
            codes: list[int] = json.loads(answer)
            return codes
    server.end()
    return None


class _Server:
    """A process that ranks are forked from, and the pipes to it."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        argv = [str(Path(__file__).with_name("rank_server.py")), *preload]
        path = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))))
        env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
        (stdin, requests), (answers, stdout) = os.pipe(), os.pipe()
        self.process: preloaded.Program | subprocess.Popen[bytes] = preloaded.fork(
            argv, cwd=Path.cwd(), env=env, files=(stdin, stdout, 2)
        ) or subprocess.Popen([sys.executable, *argv], stdin=stdin, stdout=stdout, env=env, start_new_session=True)
        os.close(stdin)
        os.close(stdout)
        self.requests, self.answers = os.fdopen(requests, "w"), os.fdopen(answers)
        atexit.register(self.end)

    def end(self) -> None:
        """End it and its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(cards: bool = False) -> tuple[int, int, list[str]]:
    """In a rank script: load the package, join the group; return (rank, world, arguments).

    Args:
        cards: every rank has a fake CUDA device.
    """
    from support.package import load_package

    load_package()
    import torch
    import torch.distributed as dist

    rank, world = int(sys.argv[1]), int(sys.argv[2])
    if cards:
        stand_in.use(stand_in.Cards(count=world))
    torch.set_num_threads(1)
    store, backend, device = dist.FileStore(sys.argv[3], world), os.environ[BACKEND], own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl" and os.environ[DEVICE] != "cuda":
        from cp_runtime.pool.launcher import as_host

        os.environ.update(as_host(rank))
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
        device_id=device if backend == "nccl" else None,
    )
    return rank, world, sys.argv[4:]


def own_device() -> torch.device:
    """In a rank script: where this rank computes."""
    import torch

    name = os.environ[DEVICE]
    return torch.device("cuda", int(sys.argv[1])) if name == "cuda" else torch.device(name)


def use_comfyui() -> None:
    """In a rank script: make ComfyUI importable, for the CPU, before anything of it is imported."""
    sys.path[0] = os.environ["COMFYUI_PATH"]
    sys.argv = ["main.py", "--cpu"]
    import comfy.cli_args

    comfy.cli_args.args.cpu = True


def finish() -> None:
    """In a rank script: end, all ranks together.

    Without gloo's destructors, as worker ranks do: its threads now and then abort the process while peers leave.
    """
    import torch.distributed as dist

    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def report(**values: Any) -> None:
    """In a rank script: print one report (only rank 0's are read)."""
    print("@" + json.dumps(values), flush=True)
