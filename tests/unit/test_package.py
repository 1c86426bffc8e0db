"""What the Comfy registry ships of this checkout: no more than a user of the nodes needs, and few words that its scanner looks for.

A version with any finding waits for a person, who reads docs/security.md.
"""

import io
import re
import subprocess
import zipfile
from collections import Counter

import pytest
from pathspec import PathSpec
from support.package import ROOT

MOST_BYTES = 1_600_000
KINDS = {
    "": {".comfyignore", "CHANGELOG.md", "LICENSE", "README.md", "__init__.py", "pyproject.toml"},
    "cp_runtime": {"py"},
    "docs": {"md"},
    "locales": {"json"},
    "nodes": {"py"},
    "subgraphs": {"json"},
    "web": {"css", "js"},
    "web/docs": {"jpg", "md"},
    "workflows": {"jpg", "json"},
}
"""By folder, the innermost that is named: the kinds of its files; of the checkout itself, the files."""
DOCUMENTS = {
    "README.md", "comparison.md", "failures.md", "generated/families.md", "gpu.md", "install.md", "machines.md", "migrate.md",
    "numerics.md", "performance.md", "security.md", "windows.md",
}  # fmt: skip
SYSTEM = "cp_runtime/system"
FINDINGS = {
    r"os\.environ|os\.(get|put|unset)env|\benviron\b": {f"{SYSTEM}/environment.py", f"{SYSTEM}/posix.py"},
    r"\bsubprocess\b": {f"{SYSTEM}/programs.py"},
    r"\bctypes\b": {f"{SYSTEM}/native.py", f"{SYSTEM}/posix.py", f"{SYSTEM}/windows.py"},
    r"\bsockets?\b": {f"{SYSTEM}/interfaces.py"},
    r"(?i)pickl": {"cp_runtime/comfy/rank/objects.py", "cp_runtime/comfy/shared/objects.py"},
    r"\b(eval|exec|__import__)\(": set(),
    r"os\.(system|popen|spawn|startfile)|shell=True|\bmarshal\b|urlopen": set(),
}
"""Words, comments included, and the files of code that have them."""
LONGEST_LINE = 400  # characters of a script: more would look like a bundle


def archived() -> dict[str, bytes]:
    """Return the files, by path, that comfy-cli packs: those in git, without what .comfyignore names."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    left_out = PathSpec.from_lines("gitignore", (ROOT / ".comfyignore").read_text().splitlines())
    return {path: (ROOT / path).read_bytes() for path in listed.split("\0")[:-1] if not left_out.match_file(path)}


ARCHIVE = archived()
CODE = {path: content.decode() for path, content in ARCHIVE.items() if path.endswith((".py", ".js"))}


def unexpected(paths) -> list[str]:
    """Return the paths that no folder of KINDS expects."""
    found = []
    for path in paths:
        folder = max((name for name in KINDS if name and path.startswith(f"{name}/")), key=len, default="")
        if (path.rpartition(".")[2] if folder else path) not in KINDS[folder]:
            found.append(path)
    return found


def test_only_what_a_user_of_the_nodes_needs_is_shipped():
    assert unexpected(ARCHIVE) == []
    assert {path.removeprefix("docs/") for path in ARCHIVE if path.startswith("docs/")} == DOCUMENTS


@pytest.mark.parametrize(
    "path", ["setup.py", "docs/images/banner.svg", "cp_runtime/run.sh", "tests/unit/test_import.py", "web/a.png"]
)
def test_other_files_are_noticed(path):
    assert unexpected([path]) == [path]


def test_what_is_shipped_stays_small():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in ARCHIVE.items():
            archive.writestr(path, content)
    print(f"{len(ARCHIVE)} files, {packed.tell()} bytes")
    assert packed.tell() < MOST_BYTES


def test_the_python_that_is_imported_is_shipped():
    there = {str(path.relative_to(ROOT)) for folder in ("cp_runtime", "nodes") for path in (ROOT / folder).rglob("*.py")}
    assert there <= {*CODE}


@pytest.mark.parametrize("pattern", FINDINGS)
def test_findings_of_a_scanner_are_where_the_review_expects_them(pattern):
    found = Counter({path: len(re.findall(pattern, text)) for path, text in CODE.items()})
    assert {path for path, count in found.items() if count} == FINDINGS[pattern], +found


def test_the_review_names_every_file_with_findings():
    review = (ROOT / "docs/security.md").read_text()
    named = {path for files in FINDINGS.values() for path in files}
    assert [path for path in sorted(named) if f"`{path.removeprefix('cp_runtime/')}`" not in review] == []


def test_scripts_are_no_bundles():
    long = [path for path, text in CODE.items() if path.endswith(".js") and max(map(len, text.splitlines())) > LONGEST_LINE]
    assert long == []
