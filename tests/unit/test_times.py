"""The table of times: what tells kinds of calls apart, what is kept on disk, and whatever lies there instead."""

import errno
import os
from pathlib import Path

import pytest
import torch

from cp_runtime.recent import Recent
from cp_runtime.timing.times import SAMPLES, Times, kind_of, least


@pytest.fixture
def file(tmp_path):
    return tmp_path / "times.json"


def keep(file, kind="flux", seconds=1.5):
    times = Times(file)
    times.add(kind, "two 4090", seconds)
    times.save()
    return times


def kept(file, kind="flux"):
    """What another process finds."""
    return Times(file).of(kind, "two 4090")


LATENT, TEXT, MASK = torch.zeros(1, 16, 8, 8), torch.zeros(1, 8, 64), torch.zeros(1, 8)


@pytest.mark.parametrize(
    ("arguments", "told_apart"),
    [
        ({"x": torch.zeros(1, 16, 8, 16)}, True),
        ({"x": torch.zeros(1, 64, 16)}, True),  # of sound
        ({"context_latents": [torch.zeros(1, 16, 1, 8, 8)]}, True),
        ({"ref_contexts": [torch.zeros(1, 9, 64)]}, True),
        ({"vace_context": torch.zeros(1, 1, 96, 1, 8, 8)}, True),
        ({"ref_mask_latents": torch.zeros(1, 28, 1, 8, 8)}, True),
        ({"control": {"input": [torch.zeros(1, 320, 8, 8)]}}, True),
        ({"cp_controlnets": ({"arguments": {"hint": torch.zeros(1, 3, 64, 64)}},)}, True),
        ({"cp_controlnets": ({"arguments": {"context": torch.zeros(1, 9, 64)}},)}, False),
        ({"context": torch.zeros(1, 9, 64)}, False),
        ({"attention_mask": torch.zeros(1, 9)}, False),
        ({"clip_text_pooled": torch.zeros(1, 9)}, False),
        ({"transformer_options": {"sample_sigmas": torch.zeros(21)}}, False),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_tells_kinds_of_calls_apart(arguments, told_apart):
    """Tokens of pictures, videos and references, whatever they are called; not texts."""
    plain = {"x": LATENT, "context": TEXT, "attention_mask": MASK}
    assert (kind_of("model", plain) != kind_of("model", plain | arguments)) == told_apart
    assert kind_of("model", plain) != kind_of("other", plain)


def test_times_are_kept_by_kind_and_devices(tmp_path):
    file = tmp_path / "new" / "times.json"
    keep(file)
    times = Times(file)
    assert (times.of("flux", "two 4090"), times.of("flux", "one 4090"), times.of("wan", "two 4090")) == ((1.5,), (), ())
    for number in range(20):
        times.add("flux", "two 4090", 1.0 + number)
    assert (len(times.of("flux", "two 4090")), least(times.of("flux", "two 4090"))) == (SAMPLES, 18.0)
    assert kept(file) == (1.5,)  # until it is saved
    assert [path.name for path in file.parent.iterdir()] == ["times.json"]


def test_seconds_that_are_none_are_not_kept(file):
    times = Times(file)
    for seconds in (0.0, -1.0, 1e-320, 1e10, float("nan"), float("inf")):
        times.add("flux", "x", seconds)
    times.save()
    assert times.of("flux", "x") == ()
    assert not file.exists()


def test_two_processes_keep_each_others_entries(file):
    one, other = Times(file), Times(file)
    for times, kind in ((one, "flux"), (other, "wan")):
        times.add(kind, "two 4090", 2.0)
        times.save()
    assert kept(file, "flux") == kept(file, "wan") == (2.0,)


def test_a_file_that_cannot_be_read_for_a_moment_keeps_its_entries(file, monkeypatch):
    keep(file)
    with monkeypatch.context() as patch:
        patch.setattr("cp_runtime.cache.json.loads", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "a network's disk")))
        assert kept(file) == ()
        keep(file, "wan")
    assert kept(file) == (1.5,)
    assert kept(file, "wan") == ()


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", '{"version": 0, "entries": {}}', '{"version": 3}', '{"version": 3, "entries": 3}']
)
def test_a_file_that_is_none_is_replaced(file, text):
    file.write_text(text)
    assert kept(file) == ()
    keep(file)
    assert kept(file) == (1.5,)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    assert keep(tmp_path / "file" / "times.json").of("flux", "two 4090") == (1.5,)


def _loop(file):
    file.symlink_to(file)


def _large(file):
    with open(file, "wb") as sparse:
        sparse.truncate(1 << 40)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, _loop, _large])
def test_what_is_no_file_counts_as_absent_and_nothing_is_left(file, make):
    make(file)
    keep(file)
    assert kept(file) == (() if make is Path.mkdir else (1.5,))
    assert [path.name for path in file.parent.iterdir()] == ["times.json"]


def test_a_recent_dict_forgets_what_was_assigned_longest_ago():
    recent = Recent(2, {"a": 1, "b": 2, "c": 3})
    recent["b"] = 4
    recent["d"] = 5
    assert list(recent.items()) == [("b", 4), ("d", 5)]
