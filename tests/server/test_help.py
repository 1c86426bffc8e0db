"""Real server: every node explains itself, in tooltips, on its help page and in the languages of `locales/`."""

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.package import load_package
from support.server import CHECKOUT, PACK

load_package()
from cp_runtime.pool.settings import SETTINGS  # noqa: E402

NODES = ("CPConfig", "ApplyContextParallel", "CPSampler", "CPReport", "CPPipeFusion", "CPVAEDecode", "CPVAEEncode")
LANGUAGES = ("en", "zh", "ja")
QUOTE = re.compile(r'"([^"]+)"')
ENTRY = re.compile(r"\*\*([^*]+)\*\*(?: `(\w+)`)?(?: \(([^)]+)\))?: (.+\.)")
"""An input or output: what the node shows, its name if that is another, default if it has one, explanation."""
LINK_END = re.compile(r"(→ )?`(\w+)` of \*\*([^*]+)\*\*")
"""An end of a link at a node of this pack: an input is behind the arrow."""
TROUBLE = re.compile(r'\*\*"[^"]+"[^*]*\*\*<br> Cause: \S.*\.<br> What to do: \S.*\.')
SPECIAL = re.compile(r"[@{}|]")
"""What the frontend's translation library takes for more than text."""

Json = dict[str, Any]


@pytest.fixture(scope="module")
def info(server) -> dict[str, Json]:
    return {name: node for name, node in server.object_info().items() if node["python_module"] == f"custom_nodes.{PACK}"}


@pytest.fixture(scope="module")
def pages(server) -> dict[str, str]:
    """Help pages, from where the frontend looks for them."""
    return {node: page_of(server, f"{node}/en") for node in NODES}


@pytest.fixture(scope="module")
def translations(server) -> dict[str, Json]:
    """Texts of nodes by language, as the frontend gets them."""
    return {language: texts["nodeDefs"] for language, texts in server.get("/api/i18n").items()}


def page_of(server, name: str) -> str:
    return server.fetch(f"/extensions/{PACK}/docs/{name}.md").decode()


def inputs_of(node: Json) -> dict[str, Json]:
    """Settings of every input, by name."""
    order = node["input_order"]
    return {name: node["input"][group][name][1] for group in ("required", "optional") for name in order.get(group, [])}


def definition(node: Json) -> Json:
    """A node's texts in the form of `nodeDefs.json`."""
    inputs: dict[str, Json] = {}
    for name, settings in inputs_of(node).items():
        inputs[name] = {"name": settings.get("display_name") or name, "tooltip": settings["tooltip"]}
        if settings.get("control_after_generate"):  # the frontend puts a widget behind it
            inputs["control_after_generate"] = {"name": "control after generate"}
    outputs = {}
    for place, (name, kind, tooltip) in enumerate(zip(node["output_name"], node["output"], node["output_tooltips"], strict=True)):
        outputs[str(place)] = ({"name": name} if name != kind else {}) | {"tooltip": tooltip}
    return {"display_name": node["display_name"], "description": node["description"], "inputs": inputs, "outputs": outputs}


def leaves(texts: Json, path: str = "") -> dict[str, str]:
    """Texts by their path."""
    found: dict[str, str] = {}
    for key, value in texts.items():
        found |= leaves(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return found


# --- tooltips ---------------------------------------------------------------------------------------------------------


def test_the_nodes_are_these(info):
    assert set(info) == set(NODES)


@pytest.mark.parametrize("node", NODES)
def test_everything_has_a_tooltip(node, info):
    spec = info[node]
    assert len(spec["description"]) > 20
    assert len(spec["search_aliases"]) >= 3
    for name, settings in inputs_of(spec).items():
        assert settings.get("tooltip"), name
    assert len(spec["output_tooltips"] or []) == len(spec["output"])
    assert all(spec["output_tooltips"] or [])


# --- help pages -------------------------------------------------------------------------------------------------------


def cells(page: str) -> list[list[str]]:
    """Rows of all tables of a page."""
    return [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]


def section(page: str, heading: str) -> str:
    """What is under a heading of a page."""
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def items(text: str) -> list[str]:
    """Items of all lists, each as one line."""
    found: list[str] = []
    for line in text.splitlines():
        if line.startswith("- "):
            found.append(line[2:])
        elif line.startswith("  ") and found:
            found[-1] += f" {line.strip()}"
    return found


def described(text: str) -> dict[str, tuple[str | None, str]]:
    """Default and explanation of every input or output that a list has, by name."""
    return {entry[2] or entry[1]: (entry[3], entry[4]) for entry in map(ENTRY.fullmatch, items(text)) if entry}


def written(default: Any) -> str | None:
    """A default as a page writes it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, str):
        return default or "empty"
    return None if default is None else f"{default:g}"


@pytest.mark.parametrize("node", NODES)
def test_the_page_explains_every_input_and_output(node, pages, info):
    inputs, outputs = (described(section(pages[node], heading)) for heading in ("Inputs", "Outputs"))
    assert list(inputs) == list(inputs_of(info[node]))
    assert list(outputs) == info[node]["output_name"]
    labels = [settings.get("display_name") or name for name, settings in inputs_of(info[node]).items()]
    assert [entry[2] for entry in map(re.compile(r"(\*\*)([^*]+)").match, items(section(pages[node], "Inputs")))] == labels
    defaults = {name: written(settings.get("default")) for name, settings in inputs_of(info[node]).items()}
    assert {name: default for name, (default, _) in inputs.items()} == defaults


def test_the_page_of_the_config_says_when_to_change_what_and_what_it_costs(pages):
    for name, (_, text) in described(section(pages["CPConfig"], "Inputs")).items():
        assert "Change it " in text, name
        assert re.search(r"\bcosts?\b", text, re.IGNORECASE), name


@pytest.mark.parametrize("node", NODES)
def test_the_page_begins_with_what_the_node_does(node, pages, info, server):
    lines = pages[node].splitlines()
    assert lines[0] == f"# {info[node]['display_name']}"
    assert lines[2].endswith(".")
    shown = re.fullmatch(r"!\[Graph\]\((images/\w+\.jpg)\)", lines[4])[1]
    server.fetch(f"/extensions/{PACK}/docs/{shown}")  # the frontend puts the path of the folder before it
    for row in cells(pages[node]):
        assert all(cell.strip() for cell in row)
    assert all(item.strip() for item in items(pages[node]))


@pytest.mark.parametrize("node", NODES)
def test_the_page_says_what_is_connected_to_what(node, pages, info):
    """The picture beside it is small."""
    by_title = {spec["display_name"]: spec for spec in info.values()}
    ends = LINK_END.findall(section(pages[node], "Connections"))
    assert info[node]["display_name"] in {title for _, _, title in ends}
    for arrow, slot, title in ends:
        assert slot in (inputs_of(by_title[title]) if arrow else by_title[title]["output_name"])


def test_the_page_of_the_config_says_which_mode_when(pages):
    rows = cells(section(pages["CPConfig"], "Choosing a mode"))[2:]
    assert [row[0].strip() for row in rows] == ["Batch", "Ulysses", "Ring", "Unified"]
    for row in rows:
        parts = re.split(r"\*\*(\w+):\*\*", "|".join(row[1:]))
        assert parts[1::2] == ["Set", "When", "Cost", "Limits"]
        assert all(text.removesuffix("<br>").strip() for text in parts[2::2])


def quoted(page: str) -> list[str]:
    """Messages that the lists under Troubleshooting quote."""
    return [quote for item in items(section(page, "Troubleshooting")) for quote in QUOTE.findall(item)]


@pytest.mark.parametrize("node", NODES)
def test_every_message_has_a_cause_and_a_remedy(node, pages):
    entries = items(section(pages[node], "Troubleshooting"))
    assert entries
    assert [entry for entry in entries if not TROUBLE.fullmatch(entry)] == []


def messages() -> Iterator[str]:
    """Every text of the source but docstrings.

    A value in it is "…", and that of a setting is put together as `errors.bad_value` does.
    """
    for file in sorted((CHECKOUT / "cp_runtime").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        documentation = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            yield "" if node in documentation else text_of(node)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bad_value":
                name, _, allowed, remedy = (text_of(argument) or "…" for argument in node.args)
                yield f"{name}: {remedy} Got …; allowed: {allowed}."
    for name, setting in SETTINGS.items():
        allowed = setting.allowed or ", ".join(setting.options)
        yield f"{name}: {setting.remedy} Got …; allowed: {allowed}." if allowed else ""


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "…" for part in node.values)
    return ""


def occurs(quote: str, message: str) -> bool:
    """Whether the parts of a quotation between "…" are in the message, in this order."""
    at = 0
    for part in quote.split("…"):
        at = message.find(part.strip(), at)
        if at < 0:
            return False
        at += len(part.strip())
    return True


@pytest.mark.parametrize("node", NODES)
def test_quoted_messages_are_those_of_the_source(node, pages):
    quotes = quoted(pages[node])
    assert quotes
    known = [text for text in messages() if text]
    # A rank's own message comes behind its number and process.
    known += [f"rank … (pid …) failed: …: {text}" for text in known if text.startswith(("the process ", "rank "))]
    assert [quote for quote in quotes if not any(occurs(quote, text) for text in known)] == []


def test_a_wrong_quotation_is_noticed():
    known = [text for text in messages() if text]
    assert any(occurs("world_size: … Got …; allowed: 0 (choose)", text) for text in known)
    assert not any(occurs("world_size: … Got …; allowed: 1 (choose)", text) for text in known)
    assert not any(occurs("The worker pool could not do what", text) for text in known)  # of a docstring


# --- help pages in other languages ------------------------------------------------------------------------------------

HEADING = re.compile(r"^#+ ", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
WORDS = {"zh": {"on": "开", "off": "关", "empty": "空"}, "ja": {"on": "オン", "off": "オフ", "empty": "空"}}
"""Defaults that are words."""
TRANSLATED_TROUBLE = {
    "zh": re.compile(r'\*\*"[^"]+"[^*]*\*\*<br> 原因：\S.*。<br> 处理：\S.*。'),
    "ja": re.compile(r'\*\*"[^"]+"[^*]*\*\*<br> 原因：\S.*。<br> 対処：\S.*。'),
}


def sections(page: str) -> list[str]:
    """What is under each heading of the second level."""
    return page.split("\n## ")[1:]


def beginnings(translated: Json, wanted: dict[str, str | None], words: dict[str, str]) -> list[str]:
    """How the entries of inputs or outputs begin: with the name that the node shows, its own name, and the default."""
    found = []
    for (name, default), texts in zip(wanted.items(), translated, strict=True):
        shown = texts.get("name", name)
        own = "" if shown == name else f" `{name}`"
        found.append(f"**{shown}**{own}" + ("" if default is None else f"（{words.get(default, default)}）") + "：")
    return found


@pytest.mark.parametrize("node", NODES)
def test_languages_without_a_page_get_the_english_one(node, pages, server):
    """The frontend asks for it where it finds none in the language."""
    assert page_of(server, node) == pages[node]


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("language", TRANSLATED_TROUBLE)
def test_the_translated_page_says_what_the_english_one_says(language, node, pages, info, translations, server):
    page, english, texts = page_of(server, f"{node}/{language}"), pages[node], translations[language][node]
    assert page.splitlines()[0] == f"# {texts['display_name']}"
    assert page.splitlines()[4] == english.splitlines()[4]
    assert HEADING.findall(page) == HEADING.findall(english)
    assert len(cells(page)) == len(cells(english))
    parts = dict(zip((part.partition("\n")[0] for part in sections(english)), sections(page), strict=True))

    defaults = {name: written(settings.get("default")) for name, settings in inputs_of(info[node]).items()}
    inputs = [texts["inputs"][name] for name in defaults]
    for heading, wanted, shown in (
        ("Inputs", defaults, inputs),
        ("Outputs", dict.fromkeys(info[node]["output_name"]), texts["outputs"].values()),
    ):
        entries = items(parts[heading])
        begin = beginnings(list(shown), wanted, WORDS[language])
        assert [entry[: len(start)] for entry, start in zip(entries, begin, strict=True)] == begin
        assert all(entry.endswith("。") and len(entry) > len(start) + 3 for entry, start in zip(entries, begin, strict=True))
    assert sorted(CODE.findall(parts["Connections"])) == sorted(CODE.findall(section(english, "Connections")))
    titles = {spec["display_name"]: translations[language][name]["display_name"] for name, spec in info.items()}
    ends = {title for _, _, title in LINK_END.findall(section(english, "Connections"))}
    assert [titles[title] for title in ends if titles[title] not in parts["Connections"]] == []

    troubles = items(parts["Troubleshooting"])
    assert [entry for entry in troubles if not TRANSLATED_TROUBLE[language].fullmatch(entry)] == []
    theirs = items(section(english, "Troubleshooting"))
    assert [QUOTE.findall(entry) for entry in troubles] == [QUOTE.findall(entry) for entry in theirs]


# --- languages --------------------------------------------------------------------------------------------------------


def test_english_is_what_the_nodes_say(translations, info):
    assert {name: translations["en"][name] for name in NODES} == {name: definition(info[name]) for name in NODES}


@pytest.mark.parametrize("language", [language for language in LANGUAGES if language != "en"])
def test_translations_are_complete(language, translations, info):
    for name in NODES:
        expected, got = leaves(definition(info[name])), leaves(translations[language][name])
        assert got.keys() == expected.keys()
        for path, text in got.items():
            assert text.strip(), path
            if " " in expected[path]:
                assert text != expected[path], path


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_hold_nothing_that_the_frontend_interprets(language, translations):
    texts = leaves({name: translations[language][name] for name in NODES})
    assert [path for path, text in texts.items() if SPECIAL.search(text)] == []
