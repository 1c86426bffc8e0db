"""Environment variables of the pool: a bad one is named where a pool is to be started, and stops no import."""

import re
from pathlib import Path

import pytest
from support.pools import make_pool

from cp_runtime.errors import ON_ONE_DEVICE, ConfigError
from cp_runtime.pool.config import DeviceInventory, RuntimeConfig, timeout_of
from cp_runtime.pool.settings import SETTINGS as CP_CONFIG
from cp_runtime.pool.settings import label_of, with_labels
from cp_runtime.words import words_in

CODE = Path(__file__).resolve().parents[2] / "cp_runtime"
SETTINGS = {"CP_STARTUP_TIMEOUT": 300.0, "CP_LOAD_TIMEOUT": 1800.0, "CP_CONNECT_TIMEOUT": 80.0}  # of 4 ranks
IMPORT = """
from support.package import load_package
load_package()
import cp_runtime.pool.worker_pool
"""


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    ("text", "seconds"), [("45", 45.0), (" 0.5 ", 0.5), ("1e3", 1000.0), (None, None), ("", None), (" ", None)]
)
def test_seconds(monkeypatch, name, text, seconds):
    monkeypatch.delenv(name, raising=False)
    if text is not None:
        monkeypatch.setenv(name, text)
    assert timeout_of(name, 4) == (SETTINGS[name] if seconds is None else seconds)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("text", ["5m", "inf", "-inf", "nan", "1e10", "-1", "0", "1,5", "x" * 10_000])
def test_what_is_no_number_of_seconds_is_refused_by_name(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(
        ConfigError, match=rf"environment variable {name}: .*unset it.* Got .*; allowed: seconds above 0 "
    ) as caught:
        make_pool()
    assert len(str(caught.value)) < 500


def test_a_bad_setting_stops_no_import(run_program):
    run_program(IMPORT, CP_STARTUP_TIMEOUT="5m", CP_LOAD_TIMEOUT="-1")


@pytest.mark.parametrize("value", ["x" * 10_000, "cpu," * 5_000 + "x" * 5_000])
def test_an_error_about_a_long_text_is_short(value):
    with pytest.raises(ConfigError, match=r"devices: .* Got '(c|x)") as caught:
        RuntimeConfig.resolve(inventory=DeviceInventory(type="cpu", count=0), devices=value)
    assert len(str(caught.value)) < 1200


def test_errors_of_the_node_begin_with_the_labels_that_it_shows():
    assert with_labels("devices: Leave it empty.") == "which GPUs (devices): Leave it empty."
    assert with_labels("shares: Leave them empty: measured.").startswith(f"{CP_CONFIG['shares'].label} (shares): Leave")
    error = with_labels("devices: Leave it empty for the first devices. Got 'x'; allowed: cpu.")
    assert words_in("zh").error(error).startswith("使用哪些 GPU（devices）：")
    ring, ulysses = (f"{CP_CONFIG[name].label} ({name})" for name in ("ring_degree", "ulysses_degree"))
    assert with_labels("ring_degree x ulysses_degree: Change a degree.") == f"{ring} x {ulysses}: Change a degree."
    assert with_labels("no name: at all") == "no name: at all"
    assert with_labels("weights: Raise memory_per_rank.").endswith(f": Raise {label_of('memory_per_rank')}.")
    assert with_labels("ring_anything is off") == f"{label_of('ring_anything')} is off"


def test_refusals_name_settings_as_nodes_show_them():
    """By labels, and not by the names of the code."""
    assert f"set {label_of('on_unsupported')} to '{CP_CONFIG['on_unsupported'].options[1]}'" == ON_ONE_DEVICE
    texts = "\n".join(path.read_text() for path in CODE.rglob("*.py"))
    assert [name for name in CP_CONFIG if re.search(rf"\b{name} of CP Config", texts)] == []
