"""Another computer that ssh reaches: a network namespace with Debian's sshd, and with a ComfyUI of its own."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from .faults import Faults
from .other_comfyui import make_comfyui
from .processes import descendants, kill_all

SSHD, PORT = "/usr/sbin/sshd", 2222
DETECTION = Path(__file__).parent / "detection"  # as servers have it


class Host:
    """Runs sshd on an address, with keys made for it, and knows it by a name.

    Args:
        folder: empty, for keys, settings, and its ComfyUI.
        prefix: command in front of sshd, which puts it into another namespace.
        models: of its ComfyUI; copied.
    """

    def __init__(
        self, folder: Path, name: str, address: str, comfyui: Path, models: Path, faults: Faults, prefix: Sequence[str] = ()
    ) -> None:
        self.folder, self.name, self.address, self._prefix = folder, name, address, list(prefix)
        self.comfyui = folder / "comfyui"
        self.models = shutil.copytree(models, folder / "models")
        self.pack = make_comfyui(self.comfyui, comfyui, self.models)
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
        key_of_host = " ".join((folder / "host.pub").read_text().split()[:2])
        (folder / "known").write_text(f"[{address}]:{PORT} {key_of_host}\n")
        detection = f"PYTHONPATH={DETECTION} " + " ".join(f"{name}={value}" for name, value in faults.environment.items())
        (folder / "sshd").write_text(
            f"Port {PORT}\nListenAddress {address}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
            f"StrictModes no\nUsePAM no\nPidFile none\nSetEnv OMP_NUM_THREADS=1 {detection}\n"
        )
        (folder / "ssh").write_text(
            f"Host {name}\n  HostName {address}\n  Port {PORT}\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {folder}/known\n"
        )
        (folder / "bin").mkdir()
        program = folder / "bin" / "ssh"
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh "$@"\n')
        program.chmod(0o755)
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        """What ComfyUI needs in its environment to find it by its name."""
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {"PATH": path, f"CP_HOST_{self.name}": f"{os.environ['CP_PYTHON']}:{self.comfyui}"}

    def start(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        command = [*self._prefix, SSHD, "-D", "-e", "-f", str(self.folder / "sshd")]
        self._log = (self.folder / "log").open("ab")
        self._process = psutil.Popen(command, stderr=self._log, stdin=subprocess.DEVNULL)
        while subprocess.run(
            [self.folder / "bin" / "ssh", "-o", "BatchMode=yes", self.name, "true"], check=False, timeout=30
        ).returncode:
            time.sleep(0.1)

    @property
    def processes(self) -> list[psutil.Process]:
        """All that run there."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return descendants(self._process.pid)
        return []

    def close(self) -> None:
        kill_all([*self.processes, self._process])
        self._process.wait()
        self._log.close()
