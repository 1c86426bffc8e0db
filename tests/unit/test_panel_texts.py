"""The texts in `locales/*/main.json`: the same in every language, and those that the browser and the server ask for."""

import json
import re
from pathlib import Path

import pytest

from cp_runtime.controller.run_stats import unit_of
from cp_runtime.pool.settings import PLACEMENTS, STAGED
from cp_runtime.words import words_in

CHECKOUT = Path(__file__).resolve().parents[2]
LANGUAGES = ("en", "zh", "ja")
PLACE = re.compile(r"\{(\w+)\}")
ASKED = {"web": r"""\b(?:t|find)\(["`]([^"`$]+)""", "cp_runtime": r"""\bsay\(f?["']([^"'{]+)"""}
"""A key that a file in a folder asks for; a group of keys such as "state." where the rest is a variable."""


def flat(texts: dict, before: str = "") -> dict[str, str]:
    found = {}
    for name, text in texts.items():
        found |= flat(text, f"{before}{name}.") if isinstance(text, dict) else {before + name: text}
    return found


def read(language: str) -> dict[str, str]:
    return flat(json.loads((CHECKOUT / "locales" / language / "main.json").read_text())["contextParallel"])


TEXTS = {language: read(language) for language in LANGUAGES}


def asked() -> set[str]:
    files = [
        (path, key) for folder, key in ASKED.items() for path in (CHECKOUT / folder).rglob("*") if path.suffix in (".js", ".py")
    ]
    return {found for path, key in files for found in re.findall(key, path.read_text())}


@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_every_language_says_the_same(language):
    texts, english = TEXTS[language], TEXTS["en"]
    assert list(texts) == list(english)
    assert {key: sorted(PLACE.findall(text)) for key, text in texts.items()} == {
        key: sorted(PLACE.findall(text)) for key, text in english.items()
    }
    assert {key for key, text in texts.items() if text == english[key]} <= {"fact.mesh", "unit.gpu", "part.controlnet", "part.vae"}


@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_nodes_have_one_name(language):
    """That which the canvas shows in this language."""
    english, own = (json.loads((CHECKOUT / "locales" / each / "nodeDefs.json").read_text()) for each in ("en", language))
    titles = [node["display_name"] for node in english.values()]
    texts = {**TEXTS[language], **flat(own)}
    assert [key for key, text in texts.items() for title in titles if title in text] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_commands_have_labels(language):
    labels = json.loads((CHECKOUT / "locales" / language / "commands.json").read_text())
    ids = re.findall(r'const COMMAND = "(\S+)"', "\n".join(path.read_text() for path in (CHECKOUT / "web").rglob("*.js")))
    assert list(labels) == [name.replace(".", "_") for name in ids]


def test_what_is_asked_for_is_there_and_nothing_else():
    keys = asked()
    assert len(keys) > 40
    missing = [key for key in keys if not any(text == key or (key.endswith(".") and text.startswith(key)) for text in TEXTS["en"])]
    assert missing == []
    groups = tuple(key for key in keys if key.endswith("."))
    assert [text for text in TEXTS["en"] if text not in keys and not text.startswith(groups)] == []


def test_what_the_server_names_has_a_text():
    controller = (CHECKOUT / "cp_runtime" / "controller" / "controller.py").read_text()
    obstacles = set(re.findall(r'measured\("(\w+)"', controller))
    assert {f"obstacle.{key}" for key in obstacles} == {key for key in TEXTS["en"] if key.startswith("obstacle.")}
    assert {f"unit.{unit_of(kind)}" for kind in ("cuda", "cpu", "npu")} == {key for key in TEXTS["en"] if key.startswith("unit.")}
    assert [placement for placement in (*PLACEMENTS, STAGED) if f"weights.{placement}" not in TEXTS["en"]] == []


@pytest.mark.parametrize(("language", "found"), [("zh", "zh"), ("zh-TW", "zh"), ("fr", "en"), ("../../tests", "en"), ("", "en")])
def test_a_language_without_texts_is_english(language, found):
    words = words_in(language)
    assert (words.language, words.say("ranks", count=2)) == (found, TEXTS[found]["ranks"].format(count=2))
