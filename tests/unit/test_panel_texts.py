"""The texts of the panel in `locales/*/main.json`: the same in every language, and those that the files in `web` ask for."""

import json
import re
from pathlib import Path

import pytest

from cp_runtime.comfy.ui.single_device import WORDS as ALONE
from cp_runtime.controller.placement import HELD
from cp_runtime.controller.run_stats import OBSTACLES, UNITS, WORDS
from cp_runtime.pool.settings import PLACEMENTS, STAGED

CHECKOUT = Path(__file__).resolve().parents[2]
LANGUAGES = ("en", "zh", "ja")
PLACE = re.compile(r"\{(\w+)\}")
ASKED = re.compile(r"""\b(?:t|find)\(["`]([^"`$]+)""")
"""A key that a file asks for; a group of keys such as "state." where the rest is a variable."""


def flat(texts: dict, before: str = "") -> dict[str, str]:
    found = {}
    for name, text in texts.items():
        found |= flat(text, f"{before}{name}.") if isinstance(text, dict) else {before + name: text}
    return found


def read(language: str) -> dict[str, str]:
    return flat(json.loads((CHECKOUT / "locales" / language / "main.json").read_text())["contextParallel"])


TEXTS = {language: read(language) for language in LANGUAGES}


def asked() -> set[str]:
    sources = "\n".join(path.read_text() for path in (CHECKOUT / "web").rglob("*.js"))
    return set(ASKED.findall(sources))


@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_every_language_says_the_same(language):
    texts, english = TEXTS[language], TEXTS["en"]
    assert list(texts) == list(english)
    assert {key: sorted(PLACE.findall(text)) for key, text in texts.items()} == {
        key: sorted(PLACE.findall(text)) for key, text in english.items()
    }
    assert [key for key, text in texts.items() if text == english[key]] in (["fact.mesh"], ["fact.mesh", "unit.gpu"])


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
    """In the same words, where both say it."""
    for group, texts in {"speed": WORDS, "obstacle": OBSTACLES, "unit": UNITS, "held": HELD}.items():
        assert {case: TEXTS["en"][f"{group}.{case}"] for case in texts} == texts
    assert {case: TEXTS["en"][f"alone.{case}"] for case in ALONE} == ALONE
    assert [placement for placement in (*PLACEMENTS, STAGED) if f"weights.{placement}" not in TEXTS["en"]] == []
