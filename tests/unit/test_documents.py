"""Links of the documents lead somewhere, also in what the registry ships, which leaves out what .comfyignore names."""

from __future__ import annotations

import ast
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
    # The frontend puts the path of this folder before what a help page names, also where the page is in a folder of its node.
    folder = CHECKOUT / "web/docs" if document.startswith("web/docs/") else (CHECKOUT / document).parent
    missing = []
    for link in LINK.findall((CHECKOUT / document).read_text()):
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (folder / link).resolve()
        if not target.exists() or (shipped(document) and not shipped(target.relative_to(CHECKOUT).as_posix())):
            missing.append(link)
    assert missing == []


# `pool/worker.py`, `engine/sharding.split_ranges`, `comfy/ui/patcher.ContextParallelPatcher.clone`, `tests/gloo/test_api.py`
REFERENCE = re.compile(
    r"`((?:cp_runtime/)?(?:engine|diffusers|families|pool|comfy/(?:ui|worker|wire)|nodes|tests|benchmarks|\.ci)(?:/\w+)*)(?:\.py)?((?:\.\w+)*)`"
)
FROM_THE_ROOT = ("nodes", "tests", "benchmarks", ".ci", "cp_runtime")


def names(tree: ast.AST) -> set[str]:
    """What a module or class defines: functions, classes, and variables."""
    found = set()
    for node in getattr(tree, "body", []):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found |= {node.name, *(f"{node.name}.{inner}" for inner in names(node))}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def lost_references(text: str) -> list[str]:
    """References to code that is not there (any more)."""
    lost = []
    for match in REFERENCE.finditer(text):
        path, name = match.groups()
        base = CHECKOUT if path.startswith(FROM_THE_ROOT) else CHECKOUT / "cp_runtime"
        file = base / f"{path}.py"
        if (base / f"{path}{name}").exists():  # a folder, or a file of another kind
            continue
        if not file.is_file() or (name and name[1:] not in names(ast.parse(file.read_text()))):
            lost.append(match[0])
    return lost


@pytest.mark.parametrize("document", documents())
def test_references_to_code(document):
    assert lost_references((CHECKOUT / document).read_text()) == []


def test_the_life_of_a_call_names_code_at_every_step():
    text = (CHECKOUT / "docs" / "architecture.md").read_text()
    steps = re.split(r"^\d+\. ", text.partition("## The life of a call")[2].partition("## Words")[0], flags=re.MULTILINE)[1:]
    assert len(steps) == 12
    assert all(REFERENCE.search(step) for step in steps)


def test_a_reference_to_code_that_is_not_there_is_noticed():
    there = "`engine/sharding.split_ranges` `pool/protocol.py` `engine/mesh.SequenceMesh.axes` `comfy/ui` `tests/unit` `engine`"
    assert lost_references(there) == []
    assert len(lost_references("`engine/sharding.split` `pool/mirror.py` `engine/mesh.SequenceMesh.axe` `comfy/ui/session`")) == 4


def test_a_document_with_a_link_to_what_is_not_shipped_is_noticed():
    assert shipped("docs/images/panel-idle-dark.png")
    assert not shipped("tests/support/server.py")
    assert LINK.findall("![a](b.png) [c](d.md#e) [f](https://g)") == ["b.png", "d.md", "https://g"]
