"""Links of the documents lead somewhere, anchors included, as on GitHub, and the documents stay short."""

import ast
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"""(?:\]\(|\bsrc(?:set)?=")([^)"\s]+)""")
ON_GITHUB = re.compile(r"https://(?:github\.com|raw\.githubusercontent\.com)/(comfyui-context-parallel/){2}((blob|tree)/)?main/")
"""Before the path of a file of this project."""
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
MOST_WORDS = 30_000


def documents() -> list[str]:
    paths = (path.relative_to(CHECKOUT) for path in CHECKOUT.rglob("*.md"))
    return sorted(path.as_posix() for path in paths if not path.parts[0].startswith(".") or path.parts[0] == ".github")


def anchors(text: str) -> set[str]:
    """What links into a document may name: its headings, as GitHub makes anchors of them."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCED.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        plain = anchor = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        again = 0
        while anchor in found:
            again += 1
            anchor = f"{plain}-{again}"
        found.add(anchor)
    return found


def lost_links(text: str, document: str) -> list[str]:
    """Links of a document, whose text is given, that lead nowhere: to no file, or to no heading."""
    folder = (CHECKOUT / document).resolve().parent  # a help page without a language is a link to the English one
    lost = []
    for link in LINK.findall(text):
        own = ON_GITHUB.match(link)
        if not own and ("://" in link or link.startswith("mailto:")):
            continue
        path, _, anchor = (link[own.end() :] if own else link).partition("#")
        target = ((CHECKOUT if own else folder) / path).resolve() if path else CHECKOUT / document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text() if path else text)):
            lost.append(link)
    return lost


@pytest.mark.parametrize("document", documents())
def test_links(document):
    assert lost_links((CHECKOUT / document).read_text(), document) == []


# `pool/worker.py`, `engine/ranks/sharding.split_ranges`, `comfy/ui/vae.Network`, `tests/ranks/api/test_api.py`
FEATURES = "|".join(folder.name for folder in (CHECKOUT / "cp_runtime" / "comfy").iterdir() if folder.is_dir())
REFERENCE = re.compile(
    rf"`((?:cp_runtime/)?(?:engine|diffusers|families|vaes|timing|pool|controller|comfy/(?:{FEATURES})|nodes|tests|benchmarks|\.ci)(?:/\w+)*)"
    r"(?:\.py)?((?:\.\w+)*)`"
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


def test_the_documents_stay_short():
    counted = [path for path in documents() if path in ("README.md", "CONTRIBUTING.md") or path.startswith("docs/")]
    assert sum(len((CHECKOUT / path).read_text().split()) for path in counted) <= MOST_WORDS
