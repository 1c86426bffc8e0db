"""No module imports itself by way of others: not inside of a function, nor for types only. So each can be read before its users."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from support.package import ROOT


def python_imports(file: Path) -> set[Path]:
    """Files of this package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            package = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for alias in node.names:
                places = package / f"{alias.name}.py", package / alias.name / "__init__.py", package.with_suffix(".py")
                found.add(next(filter(Path.is_file, places), package / "__init__.py"))
    return found - {file}


def javascript_imports(file: Path) -> set[Path]:
    return {(file.parent / path).resolve() for path in re.findall(r"""(?:from|import) *\(?["'](\.[^"']+)["']""", file.read_text())}


KINDS = {"cp_runtime": ("*.py", python_imports), "web": ("*.js", javascript_imports)}


def circle(graph: dict[Path, set[Path]]) -> list[str]:
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return [path.name for path in error.args[1]]
    return []


@pytest.mark.parametrize("folder", KINDS)
def test_no_imports_in_a_circle(folder):
    pattern, imports = KINDS[folder]
    graph = {file: imports(file) for file in (ROOT / folder).resolve().rglob(pattern)}
    assert sum(map(len, graph.values())) > len(graph)
    assert circle(graph) == []


def test_a_circle_is_found(tmp_path):
    files = {"a.py": "def late():\n    from .b import B", "b.py": "from . import c", "c.py": "from .a import late"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert set(circle({file: python_imports(file) for file in tmp_path.iterdir()})) == set(files)
