"""Runs a script as N real ranks over gloo and collects the lines that rank 0 prints.

A rank script is called as `script.py <rank> <world> <rendezvous file> [arguments]`. It calls `start()` first and `finish()` last,
and prints one JSON object per line with `report()`. Importing torch and ComfyUI takes five seconds of a core, so ranks are forked
from a process that has imported them, and what else a test names, once for all runs (`preloaded.py`, `rank_imports.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import preloaded, stand_in

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "ranks"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
DEVICE, BACKEND = "CP_TEST_DEVICE", "CP_TEST_BACKEND"
COMFY = ("comfy.sd", "support.models", "family_stock")
DIFFUSERS = ("diffusers_applying", "diffusers_changes", "diffusers_tokens", "diffusers_checks", "diffusers_models")
"""What scripts with ComfyUI or diffusers have imported for them."""

_servers: dict[tuple[str, ...], preloaded.Server] = {}


def run_ranks(
    script: str | Path,
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
        script: its path, or that in tests/ranks.
        preload: modules that the script imports and that are worth importing once.
        prepare: given to the function `prepare` of the last of these modules before the ranks start.
        device: what `own_device` returns in every rank; "cuda" is a GPU for each.
        backend: of the group of all ranks.
    """
    deadline, server = time.monotonic() + timeout, _server(preload)
    if prepare is not None and not server.prepare(preload[-1], prepare, timeout):
        server.end()
        raise AssertionError(f"{preload[-1]}.prepare({prepare}) failed, or took longer than {timeout} s")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        commands = [[str(SCRIPTS / script), str(rank), str(world), store, *arguments] for rank in range(world)]
        text = _outputs(server, commands, [{DEVICE: device, BACKEND: backend}] * world, deadline)
    return [json.loads(line[1:]) for line in text.splitlines() if line.startswith("@")]


def run_as_torchrun(program: Path, world: int, *arguments: str, timeout: float = 240, preload: tuple[str, ...] = ()) -> str:
    """Run a program in the environment that torchrun gives its processes; return what rank 0 printed.

    Args:
        preload: as that of `run_ranks`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    environments = [{**place, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return _outputs(_server(preload), [[str(program), *arguments]] * world, environments, time.monotonic() + timeout)


def _outputs(
    server: preloaded.Server, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], deadline: float
) -> str:
    """Run a program per rank; return what rank 0 printed. Raises AssertionError with the output of all on failure."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "rb") as nothing, contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(open(Path(folder) / f"rank{rank}", "w+", errors="replace")) for rank in range(len(commands))]
        ranks = [
            server.fork(
                command, env={**os.environ, **ENVIRONMENT, **own}, files=(nothing.fileno(), output.fileno(), output.fileno())
            )
            for command, own, output in zip(commands, environments, outputs, strict=True)
        ]
        try:
            codes = [rank.wait(max(0.0, deadline - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            codes = []
            for rank in ranks:
                rank.kill()
        for output in outputs:
            output.seek(0)
        texts = [output.read() for output in outputs]
    assert codes == [0] * len(ranks), "\n".join(f"--- rank {rank}\n{text[-4000:]}" for rank, text in enumerate(texts))
    return texts[0]


def run_steps(script: str | Path, world: int, *arguments: str, by: str = "step", **options: Any) -> dict[str, dict[str, Any]]:
    """`run_ranks` of a script whose reports have names, in the field `by`: name -> the other fields."""
    return {report.pop(by): report for report in run_ranks(script, world, *arguments, **options) if by in report}


def _server(preload: tuple[str, ...]) -> preloaded.Server:
    """The process that ranks with these modules are forked from."""
    server = _servers.get(preload)
    if server is None or server.process.poll() is not None:
        env = {**os.environ, **ENVIRONMENT}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))))
        path = f"\0context-parallel-ranks-{uuid.uuid4()}"
        server = _servers[preload] = preloaded.Server(path, ("support.rank_imports", *preload), env)
    return server


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
    sys.excepthook = _end  # torch has set its own
    return rank, world, sys.argv[4:]


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an error and end. Python would wait for the threads of gloo, which wait for other ranks."""
    traceback.print_exception(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def own_device() -> torch.device:
    """In a rank script: where this rank computes."""
    import torch

    name = os.environ[DEVICE]
    return torch.device("cuda", int(sys.argv[1])) if name == "cuda" else torch.device(name)


def use_comfyui() -> None:
    """In a rank script: make ComfyUI importable, for the CPU, before anything of it is imported."""
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    sys.argv = ["main.py", "--cpu"]
    import comfy.cli_args

    comfy.cli_args.args.cpu = True


def finish() -> None:
    """In a rank script: end, all ranks together.

    Without gloo's destructors, as worker ranks do: its threads now and then abort the process while peers leave. NCCL's do so where
    a peer has closed its sockets before their own barrier is over.
    """
    import torch.distributed as dist

    dist.barrier()
    if dist.get_backend() == "nccl":
        import torch

        torch.cuda.synchronize()
        store = dist.distributed_c10d._get_default_store()
        store.add("done", 1)
        while store.add("done", 0) < dist.get_world_size():
            time.sleep(0.01)
    sys.stdout.flush()
    os._exit(0)


def worst(value: float | torch.Tensor) -> float:
    """In a rank script: the largest of all ranks."""
    import torch
    import torch.distributed as dist

    shared = torch.tensor([float(value)], dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.item()


def of_all(value: Any, group: Any = None) -> list[Any]:
    """In a rank script: what every rank has, in a list."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group)
    return found


def answer(kind: type[Exception] | tuple[type[Exception], ...], run: Any, *given: Any) -> Any:
    """What a function returns; or, of an error of such a kind, what it says."""
    try:
        return run(*given)
    except kind as error:
        return str(error)


def report(**values: Any) -> None:
    """In a rank script: print one report (only rank 0's are read)."""
    print("@" + json.dumps(values), flush=True)
