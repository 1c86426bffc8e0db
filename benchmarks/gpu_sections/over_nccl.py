"""What runs over NCCL alike, whether its ranks have a card each (`several`) or share one (`nccl_ranks`).

Latents in float32: the largest difference to the stock graph, relative to their standard deviation.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from support import card_cases, checkpoints
from support.faults import Faults
from support.package import load_package
from support.ranks import run_ranks
from support.vae_graphs import vae_prompt

from .faults import FAULTS, Struck
from .modes import ATTENTION
from .options import Options
from .results import Results
from .server import compare, start, write_models

load_package()

from cp_runtime.pool.config import ONE_CARD

STRUCK = ("SIGKILL in a call", "out of device memory, until room is made", "out of device memory")


def groups(ranks: int, results: Results, *, device: str, backend: str) -> None:
    """Teams, batch groups, degrees, weights and rows by turns, in every order. Arguments as those of `run_ranks`."""
    (report,) = run_ranks(ATTENTION / "group_ranks.py", ranks, "once", timeout=120, device=device, backend=backend)
    wrong = [*report["wrong"], *report["disagreements"]]
    results.check(f"groups of {ranks} ranks", not wrong, groups=report["groups"], wrong=wrong[:3])


def serve(ranks: int, cp: dict[str, Any], options: Options, results: Results) -> None:
    """A real server whose pool has these inputs of CP Config: every way to share a call, VAEs by rows, kill, no memory, Cancel."""
    with tempfile.TemporaryDirectory() as folder:
        models, faults = Path(folder) / "models", Faults(Path(folder) / "faults")
        faults.folder.mkdir()
        checkpoints.write_all(card_cases.CHECKPOINTS, models)
        write_models(options, "support.vaes", models, *sorted({name for name, _ in card_cases.VAES}))
        environment = {**faults.environment, ONE_CARD: "1"}
        with results.part("server"), start(options, models, "--fp32-unet", "--fp32-vae", env=environment) as server:
            for name, (graph, own) in card_cases.cases(ranks).items():
                compare(server, results, name, graph(), graph(cp={**cp, **own}))
            for file, method in card_cases.VAES:
                ours = vae_prompt(file, method, "exact", world=0, **cp)
                compare(server, results, f"{file}, {method} by rows", vae_prompt(file, method), ours)
            backend = server.get("/context_parallel/status")["backend"]
            results.check("backend", backend == "nccl", found=backend)
            struck = Struck(server, faults, cp, options, results)
            for name in STRUCK:
                struck.strike(name, FAULTS[name])
            struck.cancel()
