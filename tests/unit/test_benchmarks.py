"""What benchmarks import is there: most of them take minutes or a GPU, and no test runs them."""

import ast
from pathlib import Path

import pytest
from support.package import ROOT

BENCHMARKS = ROOT / "benchmarks"
ROOTS = {"support": ROOT / "tests", "cp_runtime": ROOT, "gpu_sections": BENCHMARKS}


def imports(program: Path):
    """(module, its file or folder, name) of what a program takes from this repository, inside of functions too."""
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            base = program.parent if node.level else ROOTS.get(node.module.partition(".")[0])
            if base is not None:
                for alias in node.names:
                    yield node.module, base.joinpath(*node.module.split(".")), alias.name


def names(module: Path) -> set[str]:
    """What the first level of a module binds, whether a condition holds or not."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


@pytest.mark.parametrize("program", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_what_it_imports_is_there(program):
    missing = []
    for module, place, name in imports(program):
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if not ((place / f"{name}.py").exists() or (place / name).is_dir() or (file.exists() and name in names(file))):
            missing.append(f"{module}.{name}")
    assert missing == []
