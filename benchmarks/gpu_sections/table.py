"""The results as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .results import NEEDS_CARD, NEEDS_SEVERAL, WHOLE

NOT_FIGURES = ("section", "check", "result", "detail", "reason")


def markdown(lines: Iterable[Mapping[str, Any]]) -> str:
    """A table of the sections, then one of the results of each."""
    lines = list(lines)
    sections = list(dict.fromkeys(line["section"] for line in lines))
    out = ["# GPU check", "", "| Section | Result | Seconds | Checks | Why |", "|---|---|---|---|---|"]
    for section in sections:
        mine = [line for line in lines if line["section"] == section]
        whole = next((line for line in mine if line["check"] == WHOLE), {})
        parts = [line for line in mine if line["check"] != WHOLE]
        cells = (section, whole.get("result", "running"), whole.get("seconds", ""), _counts(parts), whole.get("reason", ""))
        out.append(_row(cells))
    for section in sections:
        shown = [line for line in lines if line["section"] == section and line["check"] != WHOLE and not line.get("detail")]
        if shown:
            out += ["", f"## {section}", "", "| Check | Result | Figures |", "|---|---|---|"]
            out += [_row((line["check"], line["result"], _figures(line))) for line in shown]
    return "\n".join(out) + "\n"


def _counts(parts: Iterable[Mapping[str, Any]]) -> str:
    """How many results there are of each kind."""
    results = [line["result"] for line in parts]
    return ", ".join(f"{results.count(kind)} {kind}" for kind in dict.fromkeys(results))


def _figures(line: Mapping[str, Any]) -> str:
    figures = [f"{name.replace('_', ' ')} {_text(value)}" for name, value in line.items() if name not in NOT_FIGURES]
    if line["result"] not in (NEEDS_CARD, NEEDS_SEVERAL) and "reason" in line:
        figures.append(line["reason"])
    return ", ".join(figures)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {_text(entry)}" for name, entry in value.items())
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _row(cells: Iterable[Any]) -> str:
    texts = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(texts)} |"
