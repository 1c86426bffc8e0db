"""Runs a script as N real ranks over gloo and collects the lines that rank 0 prints.

A rank script is called as `script.py <rank> <world> <rendezvous file> [arguments]`. It calls `start()` first and `finish()` last,
and prints one JSON object per line with `report()`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(script: Path, world: int, *arguments: str, timeout: float = 240) -> list[dict[str, Any]]:
    """Run `script` on `world` ranks; return the reports. Raises AssertionError with the output of all ranks on failure."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [open(Path(folder) / f"rank{rank}", "w+") for rank in range(world)]  # noqa: SIM115  (closed below)
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(world), str(Path(folder) / "store"), *arguments],
                stdout=outputs[rank],
                stderr=subprocess.STDOUT,
                env={**env, "PYTHONPATH": str(ROOT / "tests")},
            )
            for rank in range(world)
        ]
        try:
            codes: list[int | None] = [process.wait(timeout) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [None]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = []
        for file in outputs:
            file.seek(0)
            texts.append(file.read())
            file.close()
        assert codes == [0] * world, "\n".join(f"--- rank {rank}\n{text[-4000:]}" for rank, text in enumerate(texts))
        return [json.loads(line[1:]) for line in texts[0].splitlines() if line.startswith("@")]


def start() -> tuple[int, int, list[str]]:
    """In a rank script: load the package, join the group; return (rank, world, arguments)."""
    from support.package import load_package

    load_package()
    import torch
    import torch.distributed as dist

    rank, world = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    store = dist.FileStore(sys.argv[3], world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    return rank, world, sys.argv[4:]


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
