"""Other programs: the only module that starts any. None gets a shell, or words that a workflow could make an option of."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from subprocess import _args_from_interpreter_flags as interpreter_options  # type: ignore[attr-defined]  # multiprocessing uses it
from typing import Any

Program = subprocess.Popen[bytes]
_APART: dict[str, Any] = {"start_new_session": True}
"""Ctrl-C in the terminal reaches this process only."""
if sys.platform == "win32":  # no window either, where ComfyUI has none
    _APART = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}

__all__ = ["Program", "interpreter_options", "output_of", "start_program"]


def start_program(command: list[str], environment: Mapping[str, str], commands: int, reports: int, errors: int) -> Program:
    """Start a rank, or an ssh that leads to one, with descriptors for its standard input, output and errors. Raises OSError."""
    return subprocess.Popen(command, env=environment, stdin=commands, stdout=reports, stderr=errors, **_APART)


def output_of(command: list[str], seconds: float) -> list[str]:
    """Return the lines that a program prints. Raises OSError: it is not there, fails, or takes longer than `seconds`."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True).stdout.splitlines()
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
