"""Host memory of ComfyUI and its ranks, and the cold start: what a 1 GB checkpoint adds, and what a first prompt waits for.

    make bench, or COMFYUI_PATH=... python benchmarks/memory.py [--ranks 2]

PSS counts a page that N processes share as 1/N in each, so the sum over processes is what the machine really holds. Baseline:
the same server and ranks after a prompt with a 30 MB model and `/free`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import common
from common import note
from support import checkpoints
from support.graphs import flux_prompt
from support.processes import pss
from support.server import ComfyServer

TARGET_GB = 1.6  # for a checkpoint of 1 GB


def main() -> None:
    options = common.options(__doc__, ranks=2)
    cp = {"world_size": options.ranks}
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        checkpoints.write("flux", models)
        large = checkpoints.write("flux_large", models)
        gigabytes = large.stat().st_size / 1e9
        with ComfyServer(common.comfyui(), models=models) as server:

            def total() -> float:
                return sum(pss(pid) for pid in (server.pid, *server.worker_pids())) / 1e9

            def run(ckpt: str, steps: int, ranks: dict[str, int] | None) -> float:
                began = time.monotonic()
                server.run(flux_prompt(ckpt=ckpt, steps=steps, cp=ranks), timeout=300).check()
                return time.monotonic() - began

            stock = run("flux", 1, None)
            cold, warm = run("flux", 1, cp), run("flux", 1, cp)
            log = [line for line in server.log_text().splitlines() if "started" in line or "is on" in line]
            print(f"first prompt, 1 step: stock {stock:.2f} s; {options.ranks} ranks cold {cold:.2f} s, warm {warm:.2f} s")
            for line in log:
                print(f"  {line.strip()}")
            server.free(unload_models=True, free_memory=True)
            time.sleep(3)
            base = total()
            run("flux_large", 1, cp)
            added = total() - base
            per_gigabyte = added / gigabytes
            note("memory, GB per GB of checkpoint", per_gigabyte)
            print(
                f"server + {options.ranks} ranks without a model {base:.2f} GB; {gigabytes:.2f} GB of checkpoint add {added:.2f} GB"
            )
            print(f"per GB of checkpoint {per_gigabyte:.2f} GB, target {TARGET_GB} GB, ratio {per_gigabyte / TARGET_GB:.2f}")


if __name__ == "__main__":
    main()
