"""Links of the documents lead somewhere, also in what the registry ships, which leaves out what .comfyignore names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)#\s]+)")
LEFT_OUT = tuple(line for line in (CHECKOUT / ".comfyignore").read_text().splitlines() if line and not line.startswith("#"))


def shipped(path: str) -> bool:
    return not any(path == name or path.startswith(name) for name in LEFT_OUT)


def documents() -> list[str]:
    paths = (path.relative_to(CHECKOUT) for path in CHECKOUT.rglob("*.md"))
    return sorted(path.as_posix() for path in paths if not path.parts[0].startswith(".") or path.parts[0] == ".github")


@pytest.mark.parametrize("document", documents())
def test_links(document):
    folder = (CHECKOUT / document).parent
    missing = []
    for link in LINK.findall((CHECKOUT / document).read_text()):
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (folder / link).resolve()
        if not target.exists() or (shipped(document) and not shipped(target.relative_to(CHECKOUT).as_posix())):
            missing.append(link)
    assert missing == []


def test_a_document_with_a_link_to_what_is_not_shipped_is_noticed():
    assert shipped("docs/images/panel-idle-dark.png")
    assert not shipped("tests/support/server.py")
    assert LINK.findall("![a](b.png) [c](d.md#e) [f](https://g)") == ["b.png", "d.md", "https://g"]
