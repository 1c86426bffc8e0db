"""Names and versions that the documents give are those of the code."""

import ast
import re

import pytest
from support.package import ROOT

from cp_runtime.comfyui import TESTED
from cp_runtime.version import VERSION


def read(document: str) -> str:
    return (ROOT / document).read_text()


@pytest.mark.parametrize("file", ["README.md", "docs/install.md", "pyproject.toml", "docs/generated/families.md"])
def test_the_versions_of_comfyui_that_were_tested_are_named(file):
    (named,) = set(re.findall(r"(?:tested with|checked against)(?: ComfyUI)? ([\d. and]+\d)", " ".join(read(file).split())))
    assert tuple(named.split(" and ")) == TESTED


DOCUMENTS = [path for path in ROOT.rglob("*.md") if not path.relative_to(ROOT).parts[0].startswith(".")]
WRITTEN = "\n".join(path.read_text() for path in DOCUMENTS)
CODE = "\n".join(path.read_text() for path in ROOT.rglob("*") if path.suffix in (".py", ".js") or path.name == "Makefile")


def test_every_picture_is_shown():
    """One that nothing shows is never looked at, and is soon of another version."""
    shown = WRITTEN + read("pyproject.toml")
    pictures = [path for folder in ("docs/images", "web/docs/images") for path in (ROOT / folder).iterdir()]
    assert len(pictures) > 8
    assert [path.name for path in pictures if path.with_suffix(".png").name not in shown and path.name not in shown] == []


def test_commands_that_the_documents_name_exist():
    targets = set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^ +)make ([a-z-]+)", WRITTEN, re.MULTILINE))
    assert len(named) > 10
    assert sorted(named - targets) == []


def test_environment_variables_that_the_documents_name_are_read():
    named = set(re.findall(r"\b(CP_[A-Z_]+)\b", WRITTEN))
    assert {"CP_LOAD_TIMEOUT", "CP_PYTHON"} <= named
    assert [name for name in sorted(named) if name not in CODE] == []


def test_routes_that_the_documents_name_are_served():
    named = set(re.findall(r"(?<![\w/])(?:http://127.0.0.1:8188)?(/context_parallel/\w+)", WRITTEN))
    assert len(named) == 7
    assert [route for route in sorted(named) if f'"{route}"' not in read("cp_runtime/comfy/ui/server.py")] == []


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
