"""Texts for people, in ComfyUI's languages. They are in locales/<language>/main.json, which ComfyUI also hands to the browser."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

LOCALES = Path(__file__).resolve().parents[1] / "locales"
ENGLISH = "en"
_PLACE = re.compile(r"\{(\w+)\}")
GAP = "\0"  # between a place and what is beside it: a space, but not between two characters of these languages
_WIDE = r"[“-”\u3000-\u9fff\uff00-\uffef]"
_SEAM, _CLOSE = re.compile(r" (?={)|(?<=}) "), re.compile(rf"(?<={_WIDE})\0(?={_WIDE})")
HOLD_SENTENCES = ("", "one", "other", "sentence", "why", "remedy", "allowed", "details")
PROSE = ("one", "other", "sentence")  # of those, the ones for sentences alone, which may be other programs'
VALUES = ("host", "value", "log")  # what a user chose, or another program wrote: it stays as it is
FULL_STOPS = {"zh": "。", "ja": "。"}
JOINT = 3  # letters of the longest, " and "
MOST_PARTS = 80  # of an error; behind them is what other programs wrote
_PART_END = re.compile(r"[.:,] |\n")


class _Sentence(NamedTuple):
    """An English sentence, or a name: what stands between its places, these, and itself in another language, with numbers for them.

    `letters`: how many are read with it. A joint such as ", or " is read only beside something else, and without need not at all.
    """

    literals: list[str]
    places: list[str]
    own: str
    is_name: bool
    letters: float

    @classmethod
    def of(cls, english: str, own: str, is_name: bool) -> _Sentence:
        literals, places = _PLACE.split(english)[::2], _PLACE.findall(english)
        numbered = own.format(**{name: f"{{{at}}}" for at, name in enumerate(places)})
        letters = sum(map(str.isalpha, "".join(literals)))
        return cls(literals, places, _SEAM.sub(GAP, numbered), is_name, letters if letters > JOINT else -0.1)


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
        """Put an English error into this language, by errors.json: its sentences, with others in such {places} as HOLD_SENTENCES,
        and its names in the rest. Names in places for a {node}, an {input} or {inputs} become those that ComfyUI shows. Of all ways
        to read the text, that one counts which leaves the fewest letters in English, with the first sentence of the file around the
        others."""
        known = [each for each in self._sentences if all(part in text for part in each.literals)]
        labels = [label for kind in self._labels.values() for label in kind if label in text]

        @functools.cache
        def read(part: str, place: str) -> tuple[float, str]:
            """Return how many letters are read, and the text in this language."""
            own = self._labels.get(place, {}).get(part)
            best: tuple[float, str] = (len(part), own) if own else (0, part)
            kinds = () if place in VALUES else (False,) if place in PROSE else (False, True) if place in HOLD_SENTENCES else (True,)
            fitting = [each for each in known if each.is_name in kinds and all(one in part for one in each.literals)]
            worth = any(each.letters > 0 for each in fitting) or any(label in part for label in labels)
            for each in fitting if worth else ():
                for values in _between(each.literals, part):
                    parts = [read(value, place) for value, place in zip(values, each.places, strict=True)]
                    if (found := each.letters + sum(count for count, _ in parts)) > best[0]:
                        best = found, each.own.format(*(said for _, said in parts))
            return best

        ends = [*(each.end() for each in _PART_END.finditer(text)), len(text)]
        sentence = text[: ends[:MOST_PARTS][-1]].removesuffix(".")
        letters, said = read(sentence, "")
        stop = text[len(sentence) :]
        said = _CLOSE.sub("", said).replace(GAP, " ")
        return said + (FULL_STOPS.get(self.language, stop) if letters and stop == "." else stop)

    @functools.cached_property
    def _sentences(self) -> list[_Sentence]:
        texts = {} if self.language == ENGLISH else self._read("errors")
        return [_Sentence.of(english, own, group == "names") for group, pairs in texts.items() for english, own in pairs.items()]

    @functools.cached_property
    def _labels(self) -> dict[str, dict[str, str]]:
        """What nodes show, and what they show in this language, by place."""
        own = self._read("nodeDefs")
        nodes: dict[str, str] = {}
        inputs: dict[str, str] = {}
        for kind, node in words_in(ENGLISH)._read("nodeDefs").items():
            nodes[node["display_name"]] = own[kind]["display_name"]
            inputs |= {each["name"]: own[kind]["inputs"][name]["name"] for name, each in node.get("inputs", {}).items()}
        return {"node": nodes, "input": inputs, "inputs": inputs}

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
        return " ".join(self.say(f"prompt.{case}", **values) for case in sentence["cases"]).replace("。 ", "。")

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


def _between(literals: list[str], text: str) -> Iterator[tuple[str, ...]]:
    """Yield what stands between these parts of a text, in all ways in which they make it up; nowhere is nothing."""
    first, *rest = literals
    if not rest and text == first:
        yield ()
    if not rest or not text.startswith(first):
        return
    left = text[len(first) :]
    at = left.find(rest[0], 1 if len(rest) > 1 else max(1, len(left) - len(rest[0])))
    while at > 0:
        for more in _between(rest, left[at:]):
            yield left[:at], *more
        at = left.find(rest[0], at + 1)


words_in = functools.cache(Words)
"""`Words` of a language."""


@functools.lru_cache(100)
def translations(error: str) -> dict[str, str]:
    """Return an error in every language but English."""
    return {folder.name: words_in(folder.name).error(error) for folder in LOCALES.iterdir() if folder.name != ENGLISH}
