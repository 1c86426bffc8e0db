"""A stand-in for ssh, where no sshd may run: it starts on this computer what it is to start on another one.

Hosts are gpubox; filled, with models and packs; older, with another ComfyUI; bare, without Python; nowhere, which no name leads
to; asleep.
"""

import os
import sys
from pathlib import Path

from .other_comfyui import make_comfyui
from .package import ROOT
from .server import WAN_NODES

PROGRAM = """#!/bin/sh
# ssh -G host, or ssh options... host command
if [ "$1" = -G ]; then echo "hostname 127.0.0.1"; echo "port 22"; exit; fi
while [ $# -gt 2 ]; do shift; done
echo "$1" >> {folder}/started
case "$1" in
    nowhere) echo "ssh: connect to host nowhere port 22: No route to host" >&2; exit 255 ;;
    asleep) exec sleep 60 ;;
esac
echo "Welcome to $1"
SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22" exec sh -c "$2"
"""


def put_ssh(folder: Path, comfyui: Path | None = None, models: Path | None = None) -> dict[str, str]:
    """Make the stand-in in a folder. Returns variables of a process that is to find it; `started` there names the hosts.
    `comfyui`, `models`: of "filled"."""
    other = folder / "comfyui"
    (other / "custom_nodes").mkdir(parents=True)
    (other / "comfyui_version.py").write_text('__version__ = "0.0.1"\n')
    for name in ("comfyui-context-parallel", ROOT.name):
        (other / "custom_nodes" / name).symlink_to(ROOT, target_is_directory=True)
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(folder=folder))
    program.chmod(0o755)
    places = {"CP_HOST_older": f"{sys.executable}:{other}", "CP_HOST_bare": f"/no/python:{other}"}
    if comfyui is not None:
        make_comfyui(folder / "filled", comfyui, models, WAN_NODES)
        places["CP_HOST_filled"] = f"{sys.executable}:{folder / 'filled'}"
    return {"PATH": f"{program.parent}:{os.environ['PATH']}", **places}


def started(folder: Path) -> list[str]:
    """Hosts on which something was started, in this order."""
    return (folder / "started").read_text().split() if (folder / "started").exists() else []
