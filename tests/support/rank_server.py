"""A process that has imported what rank scripts need, and forks a rank whenever one is asked for. `support.ranks` starts it.

Importing torch and ComfyUI takes five seconds of a core, for every rank of every run; a fork takes none. The process itself
computes on one thread, because torch's own threads do not survive a fork. Its ranks share the seed of Python's hashes; those of a
pool do not.

Arguments: names of modules to import; `comfy…` makes ComfyUI's folder importable first. Each line of its input asks for one run,
`{"script": …, "store": …, "arguments": […], "outputs": [a file per rank], "environment": {…}, "prepare": …}`; the answer is a line
with the exit codes.
What is in "prepare" is given to the function of that name of the last module, in this process: all ranks find what it made.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from support.preloaded import name_process

TESTS = Path(__file__).resolve().parents[1]


def preload(modules: list[str]) -> None:
    """Import what the ranks will import."""
    from support.package import load_package
    from support.ranks import use_comfyui

    load_package()
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    if any(name.startswith("comfy") for name in modules):
        use_comfyui()
    for name in modules:
        importlib.import_module(name)


def rank(number: int, request: dict[str, Any]) -> None:
    """Become a rank. Does not return."""
    code = 1
    try:
        out = os.open(request["outputs"][number], os.O_WRONLY | os.O_APPEND)
        for fd in (1, 2):
            os.dup2(out, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(request["environment"])
        script, world = request["script"], len(request["outputs"])
        name_process(script)
        sys.argv = [script, str(number), str(world), request["store"], *request["arguments"]]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  (the test shows it)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    modules, requests = sys.argv[1:], os.fdopen(os.dup(0), "r")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    sys.path += map(str, (TESTS / "ranks").iterdir())  # what scripts have in common
    gc.disable()  # an eighth of the time
    preload(modules)
    gc.enable()
    for line in requests:
        request = json.loads(line)
        if request["prepare"] is not None:
            sys.modules[modules[-1]].prepare(request["prepare"])
        gc.freeze()  # else the collector copies what the ranks share
        pids = []
        for number in range(len(request["outputs"])):
            pid = os.fork()
            if pid == 0:
                rank(number, request)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        answers.write(json.dumps(codes) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
