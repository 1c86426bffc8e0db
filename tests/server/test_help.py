"""Real server: every node explains itself, in tooltips, on its help page and in the languages of `locales/`."""

import re
from typing import Any

import pytest
from support.package import load_package
from support.server import PACK

load_package()

NODES = ("CPConfig", "ApplyContextParallel", "CPSampler", "CPReport", "CPPipeFusion", "CPVAEDecode", "CPVAEEncode")
LANGUAGES = ("en", "zh", "ja")
ENTRY = re.compile(r"\*\*([^*]+)\*\*(?: `(\w+)`)?(?: \(([^)]+)\))?: (.+\.)")
"""An input or output: what the node shows, its name if that is another, default if it has one, explanation."""
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


@pytest.mark.parametrize("node", NODES)
def test_languages_without_a_page_get_the_english_one(node, pages, server):
    """The frontend asks for it where it finds none in the language."""
    assert page_of(server, node) == pages[node]


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
