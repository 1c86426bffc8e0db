"""Texts for people, in ComfyUI's languages. They are in locales/<language>/main.json, which ComfyUI also hands to the browser."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOCALES = Path(__file__).resolve().parents[1] / "locales"
ENGLISH = "en"


class Words:
    """The texts in a language of ComfyUI's settings such as "zh-TW"; if there are none, without its region, or in English."""

    def __init__(self, language: str) -> None:
        known = {folder.name for folder in LOCALES.iterdir()}  # a browser names the language: no other file is read
        self.language = next(name for name in (language, language.split("-")[0], ENGLISH) if name in known)
        file = LOCALES / self.language / "main.json"
        self._texts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["contextParallel"]

    def say(self, key: str, **values: Any) -> str:
        """Return the text of a key such as "state.idle", with `values` in its {places}. Raises KeyError for another key."""
        text = functools.reduce(lambda group, name: group[name], key.split("."), self._texts)
        return str(text).format(**values)

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
