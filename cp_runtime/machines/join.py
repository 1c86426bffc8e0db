"""Lets this computer work for the ComfyUI of another one: `python join.py <code>`, in ComfyUI's folder, until Ctrl-C.

The code is what ComfyUI shows on the other computer. Options: `--name pc2`, what this computer is called there; all others
are ComfyUI's own, such as `--cpu`.
"""

import importlib
import sys
from pathlib import Path


def main() -> None:
    # The package lies two folders up, beside `nodes/`, which would hide ComfyUI's: that folder must not be on `sys.path`.
    here = Path(__file__).resolve().parent
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != here]
    sys.path.insert(0, str(here.parent / "pool"))
    starter = importlib.import_module("rank_program")
    del sys.path[0]
    starter.import_by_name("cp_runtime.machines.joining").run(sys.argv)


if __name__ == "__main__":
    main()
