"""What node packs do to the code of a model is seen; the order of visits, torch and what acts elsewhere leave no trace."""

from pathlib import Path

import pytest
from support.ranks import COMFY, run_steps


@pytest.fixture(scope="module")
def seen():
    return run_steps(Path(__file__).with_name("fingerprint_ranks.py"), 1, by="name", preload=COMFY)


def test_names_do_not_depend_on_the_order_of_visits(seen):
    assert seen["stock"]["names"] > 500
    assert (seen["stock"]["backwards"], seen["stock"]["holds"]) == ([], True)


def test_an_attribute_of_a_function_has_one_name_whichever_module_is_first(seen):
    report = seen["a function with an attribute, under two names"]
    assert report["found"]
    assert report["backwards"] == []


def test_what_ranks_would_not_do_otherwise_is_no_change(seen):
    assert [seen[name]["names"] for name in ("afterwards", "harmless", "progress", "compiled")] == [[], [], [], []]


def test_changes_are_seen_by_name_and_file(seen):
    cases = {name: report for name, report in seen.items() if report.get("case")}
    assert len(cases) == 35
    for name, report in cases.items():
        assert report["names"], name
        assert not report["holds"], name
    assert any(file.endswith("fingerprint_ranks.py") for file in cases["a method, wrapped"]["files"])
    assert any(file.endswith("comfy/ldm/wan/model.py") for file in cases["a method of an older file"]["files"])


def test_objects_that_stand_for_functions_count_and_closures(seen):
    pairs = {name: report for name, report in seen.items() if report.get("pair")}
    assert len(pairs) == 13
    assert [name for name, report in pairs.items() if not report["names"]] == []
    assert [name for name, report in pairs.items() if report.get("in_place") and report["holds"]] == []


def test_what_code_assigns_by_itself_is_no_change(seen):
    used = {name: (report["names"], report["holds"]) for name, report in seen.items() if report.get("used")}
    assert len(used) == 11
    assert set(map(str, used.values())) == {"([], True)"}, used


def test_settings_of_a_pack_count_wherever_they_are_kept(seen):
    settings = {name: report for name, report in seen.items() if report.get("settings")}
    assert len(settings) == 9
    assert [name for name, report in settings.items() if not report["names"]] == []
    assert [name for name, report in settings.items() if report["holds"]] == []


def test_objects_that_answer_nothing_are_the_same_as_themselves(seen):
    odd = {name: report["names"] for name, report in seen.items() if report.get("odd")}
    assert len(odd) == 10
    assert [name for name, names in odd.items() if any(names)] == []


def test_fields_of_modules_count_by_content(seen):
    fields = {name: (report["same"], report["changed"]) for name, report in seen.items() if report.get("field")}
    assert len(fields) == 15
    assert {name: pair for name, pair in fields.items() if pair != (True, True)} == {}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("arguments of a partial", "comfy.ldm.wan.model:repeat_e.args[0]"),
        ("a VAE", "comfy.ldm.wan.vae:WanVAE.decode"),
        ("weight patches", "comfy.weight_adapter.lora:LoRAAdapter.calculate_weight"),
    ],
)
def test_what_changed_is_named(seen, name, changed):
    assert changed in seen[name]["names"]
