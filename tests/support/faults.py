"""Faults for worker ranks, and how long their consequences may take."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOAK = os.environ.get("CP_SOAK", "") == "1"
"""Whether everything runs at full length."""

SLACK = float(os.environ.get("CP_TIME_SLACK", "4"))
"""How many times its bound something may take, because the machine may be busy with something else."""

REPORT = os.environ.get("CP_RELIABILITY_REPORT", "")


@dataclass(frozen=True)
class Faults:
    """The folder that workers look into; see faulty_worker.py."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What a server needs in its environment."""
        return {"CP_TEST_FAULTS": str(self.folder)}

    @property
    def pool_environment(self) -> dict[str, str]:
        """What a process with pools needs in its environment; a server has the import path already."""
        detection = str(Path(__file__).parent / "detection")
        return {**self.environment, "PYTHONPATH": os.pathsep.join(filter(None, (detection, os.environ.get("PYTHONPATH"))))}

    def arm(self, rank: int, kind: str, at: str = "module", **settings: Any) -> None:
        """Let a rank fail, once. The file appears whole."""
        partial = self.folder / f"{rank}.partial"
        partial.write_text(json.dumps({"kind": kind, "at": at, **settings}))
        partial.rename(self.folder / f"{rank}.json")

    @property
    def waiting(self) -> list[str]:
        """Faults that no rank has taken."""
        return sorted(path.name for path in self.folder.glob("*.json"))

    def wait_taken(self) -> None:
        """Wait until ranks have taken all that was armed."""
        wait_for(lambda: not self.waiting)

    def clear(self) -> None:
        """Take back what is waiting."""
        for path in self.folder.glob("*.json"):
            path.unlink()


@dataclass
class Stopwatch:
    """Measures from the moment of a fault.

    Args:
        case: number and words of the case, as docs/generated/reliability.md shows them.
    """

    case: str
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the fault."""
        return time.monotonic() - self.began

    def within(self, bound: float, what: str, seconds: float | None = None) -> None:
        """Assert that it took at most `bound` seconds, and note the figure for the table."""
        seconds = self.seconds if seconds is None else seconds
        note(self.case, what, bound, seconds, "s")
        assert seconds <= bound * SLACK, f"{self.case}: {what}: {seconds:.2f} s, allowed {bound} s x {SLACK}"


def wait_for(condition: Callable[[], object], bound: float = 15.0) -> float:
    """Wait until it is true, and return the seconds that took: at most `bound`, times SLACK."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < bound * SLACK, f"not within {bound} s x {SLACK}"
        time.sleep(0.02)
    return time.monotonic() - began


def note(case: str, what: str, bound: float, measured: float, unit: str = "") -> None:
    """A line for the table in docs/generated/reliability.md."""
    if REPORT:
        with Path(REPORT).open("a") as out:
            out.write(json.dumps({"case": case, "what": what, "bound": bound, "measured": measured, "unit": unit}) + "\n")
