"""The errors that a user of the nodes can meet, in every language: no English is left in them but names."""

from __future__ import annotations

import ast
import itertools
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from cp_runtime.errors import UnsupportedError
from cp_runtime.pool.settings import label_of, with_labels
from cp_runtime.words import HOLD_SENTENCES, JOINT, words_in

CHECKOUT = Path(__file__).resolve().parents[2]
ERRORS = (
    "UnsupportedError", "ConfigError", "PlanError", "MirrorError", "PatchError", "PoolError", "PoolTimeout", "ChangedFileError",
    "PatchInterrupt", "UnsentError", "_Refused", "unsent",
)  # fmt: skip
VALUE = "v.w"
"""Stands for what only a run knows: a name, a number, another error."""
FRAGMENTS = ("pool/failures.py", "pool/hosts.py", "pool/launcher.py")
"""Files that put errors together piece by piece: each piece is looked at by itself."""
API = (
    "cp_runtime/diffusers/",
    "engine/ranks/config.py",
    "engine/ranks/mesh.py",
    "engine/ranks/profiling.py",
    "engine/attention/kernels.py",
)
FOR_AUTHORS = re.compile(
    r"Plan\(|the plan\b|planned|Correct the|Correct within|Give names as|Plan another|own processor|ContextParallel(In|Out)put"
    r"|torchrun|init_process_group|inference_mode|_cp_plan"
)
"""Whoever writes a plan, or calls this from Python, reads English."""
FOREIGN = re.compile(
    r"[|\\\\]|timed out$|No route|busy or|can't start|Resource temp|most recent|^,|not reached$|no answer|What it wrote"
)
"""Texts of other programs, and pieces of our own that begin or end inside a sentence."""
NAMES = re.compile(
    r"single device|Torch Compile|backend cudagraphs|Patch Sage Attention KJ|MultiGPU CFG Split|Model Sparse Attention"
    r"|ssh -o BatchMode=yes|pip install|git pull|nvidia-smi [-\w ]+|[\w/.-]*/[\w/.-]*|`[^`]*`|[\w.]*[._=:(][\w.=():-]*|<[^>]*>"
)
RUN = re.compile(r"[A-Za-z][a-z']*,? [A-Za-z]?[a-z']+")


class Texts:
    """The strings that an expression may have, as far as the code tells."""

    def __init__(self, path: Path, others: dict[str, Texts]) -> None:
        self.tree, self.others, self.name = ast.parse(path.read_text()), others, str(path.relative_to(CHECKOUT))
        self.scopes: dict[ast.AST, str] = {}  # the function around a node
        self.assigned: dict[tuple[str, str], list[ast.expr]] = defaultdict(list)  # to a name in a function, "" outside of all
        self.returned: dict[tuple[str, str], list[ast.expr]] = defaultdict(list)
        for node in ast.walk(self.tree):  # the outer functions first
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.scopes |= dict.fromkeys(ast.walk(node), node.name)
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assign(target, node.value)
            elif isinstance(node, ast.Return) and node.value is not None:
                self.returned["", self.scopes[node]].append(node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.assigned[self.scopes.get(target, ""), target.id].append(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for each, part in zip(target.elts, value.elts, strict=True):
                self._assign(each, part)

    def of(self, node: ast.expr, depth: int = 6) -> list[str]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        if isinstance(node, ast.JoinedStr):
            return self._products([part.value if isinstance(part, ast.FormattedValue) else part for part in node.values], depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._products([node.left, node.right], depth)
        if isinstance(node, ast.IfExp):
            return self.of(node.body, depth) + self.of(node.orelse, depth)
        if isinstance(node, ast.Dict):
            return [text for value in node.values for text in self.of(value, depth)]
        if isinstance(node, ast.Name) and depth:
            return self._found("assigned", node.id, self.scopes.get(node, ""), depth)
        if isinstance(node, ast.Subscript):
            return self.of(node.value, depth)
        if isinstance(node, ast.Call):
            return self._of_call(node, depth)
        return [VALUE]

    def _of_call(self, node: ast.Call, depth: int) -> list[str]:
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("rstrip", "strip", "get", "format"):
            return self.of(node.func.value, depth)
        if not isinstance(node.func, ast.Name) or not depth:
            return [VALUE]
        if node.func.id == "label_of":
            return [label_of(text) for text in self.of(node.args[0]) if text != VALUE]
        if node.func.id == "with_labels":
            return self.of(node.args[0], depth)
        return self._found("returned", node.func.id, "", depth)

    def _found(self, kind: str, name: str, scope: str, depth: int) -> list[str]:
        """The texts of a name in a function, of this file or of another one."""
        for each, at in ((self, (scope, name)), *((each, ("", name)) for each in (self, *self.others.values()))):
            if at in getattr(each, kind):
                texts = [text for value in getattr(each, kind)[at] for text in each.of(value, depth - 1)]
                sentences = list(dict.fromkeys(text for text in texts if " " in text))
                return sentences + [""] * ("" in texts) if sentences else [VALUE]
        return [VALUE]

    def _products(self, parts: list[ast.expr], depth: int) -> list[str]:
        return ["".join(each) for each in itertools.islice(itertools.product(*(self.of(part, depth) for part in parts)), 200)]

    def errors(self) -> Iterator[str]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if node.args and (name in ERRORS or (name == "__init__" and self.name.endswith("errors.py"))):
                    yield from self.of(node.args[0])
                elif name == "Choice":
                    yield from self.of(node.args[1])
                elif name == "bad_value":
                    yield from self._bad_values(*node.args)
            elif isinstance(node, ast.Yield) and node.value is not None:
                yield from (text for text in self.of(node.value) if text.endswith("."))
            elif isinstance(node, ast.keyword) and node.arg in ("unstaged", "remedy"):
                yield from self.of(node.value)
        if self.name.endswith(FRAGMENTS):
            yield from self._fragments()

    def _bad_values(self, field: ast.expr, got: ast.expr, allowed: ast.expr, remedy: ast.expr) -> Iterator[str]:
        for parts in itertools.product(self.of(field), self.of(allowed), self.of(remedy)):
            yield "{0}: {2} Got v.w; allowed: {1}.".format(*parts)

    def _fragments(self) -> Iterator[str]:
        alone = [node for node in ast.walk(self.tree) if isinstance(node, ast.Expr)]  # docstrings, and what is logged
        silent = {id(part) for node in alone for part in ast.walk(node)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.JoinedStr):
                silent |= {id(part) for part in ast.walk(node)} - {id(node)}
            if isinstance(node, (ast.JoinedStr, ast.Constant)) and id(node) not in silent:
                yield from (text.strip() for text in self.of(node) if re.search(r"[a-z] [a-z]", text) and not FOREIGN.search(text))


FILES: dict[str, Texts] = {}
for source in (path for folder in ("cp_runtime", "nodes") for path in sorted((CHECKOUT / folder).rglob("*.py"))):
    FILES[str(source)] = Texts(source, FILES)
SAID = {
    re.sub(r"v\.w (?=[A-Z])", "v.w. ", with_labels(text).partition("\n\n")[0].replace("{path}", VALUE)): each.name
    for each in FILES.values()
    if not any(part in each.name for part in API)
    for text in each.errors()
    if not FOR_AUTHORS.search(text)
}
"""All errors, and where they are."""
LANGUAGES = ("zh", "ja")
ERRORS = {language: json.loads((CHECKOUT / "locales" / language / "errors.json").read_text()) for language in LANGUAGES}
TEXTS = ERRORS["zh"]
PLACE = re.compile(r"{(\w+)}")


def english_in(text: str) -> list[str]:
    return RUN.findall(NAMES.sub("·", text))


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_error_is_left_in_english(language):
    words = words_in(language)
    left = {f"{where}: {text}": words.error(text) for text, where in SAID.items() if english_in(words.error(text))}
    assert left == {}


def filled(texts: str, **values: str) -> str:
    return PLACE.sub(lambda place: values.get(place[1], VALUE), texts)


def tight(text: str) -> str:
    """A text without spaces: they depend on what is beside them."""
    return text.replace(" ", "")


@pytest.mark.parametrize("place", ["node", "code", "why"])
def test_sentences_in_sentences_are_read_whole(place):
    """Wherever a sentence holds another one, or names a node; every third pair, as there are thousands."""
    words, wrong = words_in("zh"), []
    outer = [each for each in TEXTS["sentences"].items() if f"{{{place}}}" in each[0]]
    inner = [*TEXTS["sentences" if place in HOLD_SENTENCES else "names"].items()]
    whole = [each for each in inner if len(re.sub(r"{\w+}|[^a-zA-Z]", "", each[0])) > JOINT]
    for (text, own), (part, own_part) in [*itertools.product(outer, whole)][::3]:
        error = f"{filled(text, **{place: filled(part)})}. Remove that node."
        expected = f"{filled(own, **{place: filled(own_part)})}。{TEXTS['sentences']['Remove that node']}。"
        if tight(words.error(error)) != tight(expected):
            wrong.append((error, words.error(error)))
    assert wrong == []


@pytest.fixture(scope="module")
def code() -> str:
    """All texts of the code."""
    nodes = [node for each in FILES.values() for node in ast.walk(each.tree)]
    constants = {id(node): node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    filled = ["{}".join(constants.get(id(part), "") for part in node.values) for node in nodes if isinstance(node, ast.JoinedStr)]
    return "\n\n".join((*constants.values(), *filled))


def test_sentences_are_those_of_the_code(code):
    """The same in every language, each one that the code says."""
    every = "\n".join((code, *SAID)).lower()
    for group, texts in ERRORS["zh"].items():
        assert list(texts) == list(ERRORS["ja"][group])
        for english, own in [*texts.items(), *ERRORS["ja"][group].items()]:
            assert sorted(PLACE.findall(own)) == sorted(PLACE.findall(english))
            assert [part for part in PLACE.split(english.lower())[::2] if part.strip(" .,:()") not in every] == []


def test_an_error_in_another_language():
    """With the names of nodes and inputs that ComfyUI shows in it; what no sentence fits stays in English."""
    remedy = "Remove that node, or set “which GPUs” of CP Config to 'single device'."
    error = f"Apply Context Parallel: a node put a hook on blocks.0. {remedy}"
    for language in LANGUAGES:
        texts, words = ERRORS[language]["sentences"], words_in(language)
        nodes = json.loads((CHECKOUT / "locales" / language / "nodeDefs.json").read_text())
        label, name = nodes["CPConfig"]["inputs"]["devices"]["name"], nodes["ApplyContextParallel"]["display_name"]
        own = texts["set {setting} to 'single device'"].format(
            setting=ERRORS[language]["names"]["“{input}” of CP Config"].format(input=label)
        )
        problem = texts["a node put a hook on {path}"].format(path="blocks.0")
        remedy = texts["{one}, or {other}"].format(one=texts["Remove that node"], other=own)
        assert words.error(error) == f"{name}：{problem}。{remedy}。"
        assert words.error("what nobody knows") == "what nobody knows"
    assert words_in("en").error(error) == error


WHOLE = json.loads(Path(__file__).with_name("errors_zh.json").read_text())


@pytest.mark.parametrize("error", WHOLE)
def test_an_error_of_several_sentences(error):
    """Words of other programs stay as they are."""
    assert words_in("zh").error(error) == WHOLE[error]


def test_a_long_error_takes_no_time():
    """As other programs write them: it is read up to some length."""
    error = "rank 1 (pid 7) failed: RuntimeError: " + "\n".join(
        "size mismatch, or not: a. b. a node put a hook on x." for _ in range(500)
    )
    began = time.monotonic()
    own = words_in("ja").error(error)
    assert time.monotonic() - began < 5
    assert own.startswith("rank 1（pid 7）が失敗しました")


def test_remedies_are_one_or_another():
    other = "Remove that node."
    assert UnsupportedError("It records.", "Choose inductor.").or_else(other) == "It records. Choose inductor. Or remove that node."
    assert UnsupportedError("It records.").or_else(other) == "It records. Remove that node."
