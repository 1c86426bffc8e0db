"""Names and versions that the documents give are those of the code."""

import ast
import re

import pytest
from support.package import ROOT

from cp_runtime.comfyui import TESTED
from cp_runtime.version import VERSION


def read(document: str) -> str:
    return (ROOT / document).read_text()


WRITTEN = "\n".join(path.read_text() for path in ROOT.rglob("*.md") if not path.relative_to(ROOT).parts[0].startswith("."))
CODE = "\n".join(path.read_text() for path in ROOT.rglob("*") if path.suffix in (".py", ".js") or path.name == "Makefile")
NAMED = {
    "command": (r"(?:`|^ +)make ([a-z-]+)", 10, lambda name: re.search(rf"^{name}:", read("Makefile"), re.MULTILINE)),
    "environment variable": (r"\b(CP_[A-Z_]+)\b", 10, lambda name: name in CODE),
    "route": (r"(?<![\w/])(?:http://127.0.0.1:8188)?(/context_parallel/\w+)", 7, lambda route: f'"{route}"' in CODE),
}
"""What the documents name: how, how many at least, and whether the code has it."""


@pytest.mark.parametrize("kind", NAMED)
def test_what_the_documents_name_exists(kind):
    pattern, least, exists = NAMED[kind]
    named = set(re.findall(pattern, WRITTEN, re.MULTILINE))
    assert len(named) >= least
    assert [name for name in sorted(named) if not exists(name)] == []


@pytest.mark.parametrize("file", ["README.md", "docs/install.md", "pyproject.toml", "docs/generated/families.md"])
def test_the_tested_versions_of_comfyui_are_named(file):
    (named,) = set(re.findall(r"(?:tested with|checked against)(?: ComfyUI)? ([\d. and]+\d)", " ".join(read(file).split())))
    assert tuple(named.split(" and ")) == TESTED


def test_every_key_of_the_status_is_documented():
    module = ast.parse(read("cp_runtime/comfy/ui/status.py"))
    (status,) = [node for node in module.body if isinstance(node, ast.ClassDef)]
    assigned = {ast.unparse(node.targets[0]): node.value for node in ast.walk(status) if isinstance(node, ast.Assign)}
    inside = ast.literal_eval(assigned["inside"])
    written = [node for node in ast.walk(status) if isinstance(node, ast.Dict)]
    keys = {key.value for node in written for key in node.keys if isinstance(key, ast.Constant)}
    keys |= {field.target.id for field in status.body if isinstance(field, ast.AnnAssign)} - {*inside}
    assert {"state", "speed", "ranks"} <= keys
    page = read("docs/failures.md").partition("## The status")[2]
    assert sorted(key for key in keys if f"`{key}`" not in page) == []


def test_the_version_is_that_of_the_project_file():
    assert re.search(r'^version = "(.+)"$', read("pyproject.toml"), re.MULTILINE)[1] == VERSION
