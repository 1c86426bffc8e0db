"""Texts for people, in ComfyUI's languages. They are in locales/<language>/main.json, which ComfyUI also hands to the browser."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOCALES = Path(__file__).resolve().parents[1] / "locales"
ENGLISH = "en"
_PLACE = re.compile(r"\\\{(\w+)\\\}")  # after `re.escape`


class Words:
    """The texts in a language of ComfyUI's settings such as "zh-TW"; if there are none, without its region, or in English."""

    def __init__(self, language: str) -> None:
        known = {folder.name for folder in LOCALES.iterdir()}  # a browser names the language: no other file is read
        self.language = next(name for name in (language, language.split("-")[0], ENGLISH) if name in known)
        self._texts: dict[str, Any] = self._read("main")["contextParallel"]

    def say(self, key: str, **values: Any) -> str:
        """Return the text of a key such as "state.idle", with `values` in its {places}. Raises KeyError for another key."""
        text = functools.reduce(lambda group, name: group[name], key.split("."), self._texts)
        return str(text).format(**values)

    def error(self, text: str) -> str:
        """Put an English error into this language: by the first sentence of errors.json that fits, and its parts likewise. A name
        of a node or an input becomes the one that ComfyUI shows; what is not known stays as it is."""
        for pattern, own in self._sentences:
            if found := pattern.fullmatch(text):
                return own.format(**{name: self.error(part) for name, part in found.groupdict().items()})
        return self._names.get(text, text)

    @functools.cached_property
    def _sentences(self) -> list[tuple[re.Pattern[str], str]]:
        """Patterns of English sentences, and the sentences in this language."""
        texts: dict[str, str] = {} if self.language == ENGLISH else self._read("errors")
        patterns = {_PLACE.sub(r"(?P<\1>.+?)", re.escape(english)): own for english, own in texts.items()}
        return [(re.compile(pattern, re.DOTALL), own) for pattern, own in patterns.items()]

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        found, own = {}, self._read("nodeDefs")
        for kind, node in words_in(ENGLISH)._read("nodeDefs").items():
            found[node["display_name"]] = own[kind]["display_name"]
            found |= {each["name"]: own[kind]["inputs"][name]["name"] for name, each in node.get("inputs", {}).items()}
        return found

    def _read(self, name: str) -> dict[str, Any]:
        return dict(json.loads((LOCALES / self.language / f"{name}.json").read_text(encoding="utf-8")))

    def speed(self, parts: Mapping[str, Any]) -> str:
        """Put `Speed.parts` into words: "20 steps in 9 s instead of about 17 s: 1.9 × as fast as one GPU"."""
        obstacle = parts["obstacle"] and self.say(f"obstacle.{parts['obstacle']}")
        named, speed = {**parts, "unit": self.say(f"unit.{parts['unit']}"), "obstacle": obstacle}, ""
        for case in parts["cases"]:
            speed = self.say(f"speed.{case}", **{**named, "speed": speed})
        return speed

    def prompt(self, sentence: Mapping[str, Any]) -> str:
        """Put the sentence of `PromptTimes.described` into words: "Denoising took 41 of 52 s."."""
        values = {**sentence, "unit": self.say(f"unit.{sentence.get('unit', 'device')}")}
        return " ".join(self.say(f"prompt.{case}", **values) for case in sentence["cases"])

    def held(self, parts: Mapping[str, str]) -> str:
        """Put `placement.held_parts` into words: the share of a model on each device."""
        return self.say(f"held.{parts['case']}", **{**parts, "unit": self.say(f"unit.{parts['unit']}")})

    def choice(self, choice: Mapping[str, Any] | None) -> str:
        """Put a `Chooser.described` into words: "1 of 4 devices; 4 would take 1.30 times as long (measured)". Empty without one.

        The time on one device is left to the speed of the run, and a faster number of ranks to the next calls.
        """
        if choice is None:
            return ""
        text, other = self.say("node.some", count=choice["ranks"], all=choice["of"]), choice["alternative"]
        if other is None or other["times"] < 1 or other["ranks"] == 1:
            return text
        return self.say("node.measured", some=text, count=other["ranks"], times=f"{other['times']:.2f}")

    def mesh(self, degrees: Mapping[str, float], at_work: float | None) -> str:
        """Put the mesh of a call into words. `degrees`: a rank's, by axis. `at_work`: ranks that shared it; None = unknown."""
        named = " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        return named or (self.say("node.one_at_work") if at_work in (None, 1) else self.say("node.at_work", count=at_work))


words_in = functools.cache(Words)
"""`Words` of a language."""


@functools.lru_cache(100)
def translations(error: str) -> dict[str, str]:
    """Return an error in every language but English."""
    return {folder.name: words_in(folder.name).error(error) for folder in LOCALES.iterdir() if folder.name != ENGLISH}
