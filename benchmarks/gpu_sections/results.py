"""Results: a line of JSON each, written at once, so that a section that hangs later has said what it saw."""

from __future__ import annotations

import contextlib
import getpass
import json
import platform
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OK, FAILED, TIMED_OUT = "ok", "failed", "timed out"
NEEDS_CARD, NEEDS_SEVERAL = "needs a card", "needs several GPUs"
BAD = (FAILED, TIMED_OUT)
WHOLE = "section"
"""Name of the result that the runner adds for the section itself."""
LONGEST = 400  # characters of a text

_PATH = re.compile(r"(?<![\w/.])(?:~|/[\w.@+-]+)(?:/[\w.@+-]+)+/?")  # of two parts and more: /free is an address


class Results:
    """Appends to a file.

    Args:
        path: of the file.
        section: that reports.
    """

    def __init__(self, path: Path, section: str) -> None:
        self.path, self.section = path, section

    def add(self, check: str, result: str = OK, *, detail: bool = False, **figures: Any) -> None:
        """One result.

        Args:
            detail: for results.jsonl only, not for the table.
        """
        line = {"section": self.section, "check": check, "result": result, **({"detail": True} if detail else {}), **figures}
        with self.path.open("a") as file:
            file.write(json.dumps(anonymous(line)) + "\n")
        print(f"{check}: {result} {figures}", flush=True)

    def check(self, name: str, good: bool, **figures: Any) -> None:
        """A result that is good or not."""
        self.add(name, OK if good else FAILED, **figures)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of a section whose error is a result, and does not stop the section."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (whatever it is, it is the result)
            traceback.print_exc()
            self.add(name, FAILED, reason=f"{type(error).__name__}: {error}")


def read(path: Path) -> list[dict[str, Any]]:
    """All results, in the order in which they came. A last line that is cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def anonymous(value: Any) -> Any:
    """The value without paths, and without the names of user and machine in its texts; numbers as short as they are worth."""
    if isinstance(value, dict):
        return {key: anonymous(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [anonymous(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if not isinstance(value, str):
        return value
    text = _PATH.sub("<path>", value)
    for name in _names():
        text = re.sub(rf"\b{re.escape(name)}\b", "<name>", text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


def _names() -> list[str]:
    """What a text must not tell; too short ones would cut words of the report."""
    names = [platform.node()]
    with contextlib.suppress(KeyError, OSError, ImportError):  # a user without a name
        names.append(getpass.getuser())
    return [name for name in names if len(name) > 3 and name != "root"]
