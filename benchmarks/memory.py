"""Host memory of ComfyUI and its ranks, and the cold start: what a 1 GB checkpoint adds, and what a first prompt waits for.

    make bench, or COMFYUI_PATH=... python benchmarks/memory.py [--ranks 2]

PSS counts a page that N processes share as 1/N in each, so the sum over processes is what the machine really holds. Baseline:
the same server and ranks after a prompt with a 30 MB model and `/free`.
"""

from __future__ import annotations

import time

import common
from support import checkpoints
from support.graphs import flux_prompt
from support.processes import pss
from support.server import ComfyServer

TARGET_GB = 1.6  # for a checkpoint of 1 GB


def main() -> None:
    options = common.options(__doc__, ranks=2)
    cp = {"world_size": options.ranks}
    with common.models("flux") as models, ComfyServer(common.comfyui(), models=models) as server:
        gigabytes = checkpoints.write_flux("flux_large", models, hidden=1024, double_blocks=4, single_blocks=8).stat().st_size / 1e9

        def total() -> float:
            return sum(pss(pid) for pid in (server.pid, *server.worker_pids())) / 1e9

        def run(ckpt: str, ranks: dict[str, int] | None) -> float:
            began = time.monotonic()
            server.run(flux_prompt(ckpt=ckpt, steps=1, cp=ranks), timeout=300).check()
            return time.monotonic() - began

        stock, cold, warm = (run("flux", ranks) for ranks in (None, cp, cp))
        common.show("first prompt, 1 step, seconds", stock=stock, ranks_cold=cold, ranks_warm=warm)
        for line in server.log_text().splitlines():
            if "started" in line or "is on" in line:
                print(f"  {line.strip()}")
        server.free(unload_models=True, free_memory=True)
        time.sleep(3)
        base = total()
        run("flux_large", cp)
        added = total() - base
        common.show(f"server + {options.ranks} ranks", GB_without_a_model=base, GB_of_checkpoint=gigabytes, GB_added=added)
        common.show("checkpoint", {"GB per GB": added / gigabytes}, target_GB=TARGET_GB)


if __name__ == "__main__":
    main()
