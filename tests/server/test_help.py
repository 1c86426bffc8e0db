"""Real server: every node has texts and a help page, in the languages of `locales/`."""

import re
from typing import Any

import pytest
from support.server import PACK

NODES = (
    "CPConfig",
    "ApplyContextParallel",
    "CPSampler",
    "CPReport",
    "CPPipeFusion",
    "CPVAEDecode",
    "CPVAEEncode",
    "CPUpscaleImage",
)
LANGUAGES = ("en", "zh", "ja")
SPECIAL = re.compile(r"[@{}|]")
"""What the frontend's translation library takes for more than text."""

Json = dict[str, Any]


@pytest.fixture(scope="module")
def info(server) -> dict[str, Json]:
    return {name: node for name, node in server.object_info().items() if node["python_module"] == f"custom_nodes.{PACK}"}


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


def test_the_nodes_are_these(info):
    assert set(info) == set(NODES)


@pytest.mark.parametrize("node", NODES)
def test_every_language_has_a_help_page(node, server, translations):
    """Under the node's name. The frontend takes the one without a language for all others."""
    pages = {language: page_of(server, f"{node}/{language}") for language in LANGUAGES}
    assert page_of(server, node) == pages["en"]
    for language, page in pages.items():
        assert page.splitlines()[0] == f"# {translations[language][node]['display_name']}"


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
