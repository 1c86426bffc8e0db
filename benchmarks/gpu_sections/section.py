"""What a section is told, and its results: a line of JSON each, written at once, and all of them as Markdown."""

from __future__ import annotations

import contextlib
import getpass
import json
import platform
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, FAILED, TIMED_OUT = "ok", "failed", "timed out"
NEEDS_CARD, NEEDS_SEVERAL = "needs a card", "needs several GPUs"
WHOLE = "section"
"""Name of the result that the runner adds for the section itself."""
LONGEST = 400  # characters of a text
REPETITIONS = 4

_PATH = re.compile(r"(?<![\w/.])(?:~|/[\w.@+-]+)(?:/[\w.@+-]+)+/?")  # of two parts and more: /free is an address


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section: how it runs, and where it reports.

    Args:
        path: of the file that results are appended to.
        rehearse: with small sizes, on fake CUDA devices (`support.stand_in`).
        few: few cases.
        limits: times as long as usual that something may take.
        device: where tensors lie.
    """

    name: str
    path: Path
    rehearse: bool = False
    few: bool = False
    limits: float = 1.0
    device: str = "cuda:0"

    def ranks(self, count: int, backend: str = "gloo") -> dict[str, Any]:
        """Inputs of CP Config for ranks that share this machine's one device."""
        return {"devices": ",".join([self.device] * count), "backend": backend}

    def add(self, check: str, result: str = OK, *, detail: bool = False, **figures: Any) -> None:
        """Report one result.

        Args:
            detail: for results.jsonl only, not for the table.
        """
        line = {"section": self.name, "check": check, "result": result, **({"detail": True} if detail else {}), **figures}
        with self.path.open("a") as file:
            file.write(json.dumps(anonymous(line)) + "\n")
        print(f"{check}: {result} {figures}", flush=True)

    def check(self, name: str, good: bool, **figures: Any) -> None:
        """Report a result that is good or not."""
        self.add(name, OK if good else FAILED, **figures)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Make an error of a part of the section a result, which does not stop the section."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (whatever it is, it is the result)
            traceback.print_exc()
            self.add(name, FAILED, reason=f"{type(error).__name__}: {error}")


def verdict(lines: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the result of a section that came to its end, of the results of its checks, and the reason if it is not ok."""
    results = [line["result"] for line in lines]
    for bad in (FAILED, TIMED_OUT):
        if bad in results:
            return bad, f"{results.count(bad)} of {len(results)} checks {bad}"
    if not results:
        return FAILED, "it reported nothing"
    return (OK, "") if OK in results else (results[0], "")


def milliseconds(run: Callable[[], object]) -> dict[str, float]:
    """The best of some runs after one to warm up: until the host has handed everything to the device, and on the device's clock."""
    import torch  # not for the runner

    run()
    host, device = [], []
    for _ in range(REPETITIONS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        began = time.perf_counter()
        start.record()
        run()
        end.record()
        host.append(1e3 * (time.perf_counter() - began))
        end.synchronize()
        device.append(float(start.elapsed_time(end)))
    return {"host_ms": min(host), "ms": min(device)}


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
    names = [platform.node()]
    with contextlib.suppress(KeyError, OSError, ImportError):  # a user without a name
        names.append(getpass.getuser())
    text = _PATH.sub("<path>", value)
    for name in names:
        if len(name) > 3 and name != "root":  # shorter ones would cut words of the report
            text = re.sub(rf"\b{re.escape(name)}\b", "<name>", text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


def markdown(lines: Iterable[Mapping[str, Any]]) -> str:
    """A table of the sections, then one of the results of each."""
    sections: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        sections.setdefault(line["section"], []).append(line)
    out = ["# GPU check", "", "| Section | Result | Seconds | Checks | Why |", "|---|---|---|---|---|"]
    tables = []
    for section, mine in sections.items():
        whole = next((line for line in mine if line["check"] == WHOLE), {})
        results = [line["result"] for line in mine if line["check"] != WHOLE]
        counts = ", ".join(f"{results.count(kind)} {kind}" for kind in dict.fromkeys(results))
        out.append(_row(section, whole.get("result", "running"), whole.get("seconds", ""), counts, whole.get("reason", "")))
        shown = [line for line in mine if line["check"] != WHOLE and not line.get("detail")]
        if shown:
            tables += ["", f"## {section}", "", "| Check | Result | Figures |", "|---|---|---|"]
            tables += [_row(line["check"], line["result"], _figures(line)) for line in shown]
    return "\n".join([*out, *tables]) + "\n"


def _figures(line: Mapping[str, Any]) -> str:
    known = ("section", "check", "result", "detail", "reason")
    figures = [f"{name.replace('_', ' ')} {_text(value)}" for name, value in line.items() if name not in known]
    return ", ".join([*figures, *([line["reason"]] if "reason" in line else [])])


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {_text(entry)}" for name, entry in value.items())
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"
