"""Workflows that users have saved still load: the definitions on a real server against those of the newest stored release.

`.ci/definitions.py` says what is compared, and writes the file of a release. The other tests here change copies of the stored
definitions: the comparison must notice what breaks a workflow, and only that.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "definitions.py"
spec = importlib.util.spec_from_file_location("node_definitions", SCRIPT)
assert spec is not None
assert spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

VERSION, RELEASED = tool.stored()


def test_workflows_of_the_newest_release_load(server):
    object_info = server.object_info()
    current = tool.definitions(object_info)
    assert current, f"the server has no nodes of {tool.PACK}"
    problems = tool.broken(RELEASED, current, tool.usable(server.get("/node_replacements"), object_info))
    if problems:
        pytest.fail(tool.advice(problems, VERSION, RELEASED), pytrace=False)


def test_options_of_comfyui_are_not_stored():
    inputs = {entry["name"]: entry for entry in RELEASED["CPSampler"]["inputs"]}
    assert inputs["sampler_name"]["type"] == "COMBO"
    assert all("options" not in inputs[name] for name in ("sampler_name", "scheduler"))
    assert inputs["seed"]["control_after_generate"]
    config = {entry["name"]: entry for entry in RELEASED["CPConfig"]["inputs"]}
    assert config["rotate_method"]["options"] == ["alltoall", "allgather"]


def test_versions_are_compared_as_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "FOLDER", tmp_path)
    assert tool.stored() is None
    for version in ("0.2.0", "0.10.0", "0.9.1"):
        (tmp_path / f"{version}.json").write_text("{}")
    assert tool.stored() == ("0.10.0", {})
    assert tool.stored(without="0.10.0") == ("0.9.1", {})


# --- the comparison ---------------------------------------------------------------------------------------------------


def entry(node, name):
    return next(entry for entry in node["inputs"] if entry["name"] == name)


def remove_input(nodes):
    nodes["CPConfig"]["inputs"].remove(entry(nodes["CPConfig"], "backend"))


def rename_input(nodes):
    entry(nodes["CPConfig"], "ring_degree")["name"] = "ring"


def change_type(nodes):
    entry(nodes["CPConfig"], "world_size")["type"] = "FLOAT"


def widget_becomes_socket(nodes):
    entry(nodes["CPConfig"], "devices")["widget"] = False


def swap_widgets(nodes):
    inputs = nodes["CPConfig"]["inputs"]
    inputs[2], inputs[3] = inputs[3], inputs[2]


def insert_widget(nodes):
    nodes["CPConfig"]["inputs"].insert(1, {"name": "new", "type": "INT", "optional": True, "widget": True})


def append_required(nodes):
    nodes["CPConfig"]["inputs"].append({"name": "new", "type": "INT", "optional": False, "widget": True})


def lose_option(nodes):
    entry(nodes["CPConfig"], "backend")["options"].remove("gloo")


def narrow_range(nodes):
    entry(nodes["CPConfig"], "world_size")["max"] = 8


def lose_control(nodes):
    entry(nodes["CPSampler"], "seed")["control_after_generate"] = False


def become_required(nodes):
    entry(nodes["CPSampler"], "cp_config")["optional"] = False


def swap_outputs(nodes):
    nodes["CPSampler"]["outputs"].reverse()


def change_output(nodes):
    nodes["ApplyContextParallel"]["outputs"][0]["type"] = "CP_MODEL"


def lose_output(nodes):
    nodes["CPSampler"]["outputs"].pop()


def remove_node(nodes):
    del nodes["CPSampler"]


BREAKING = {
    remove_input: "CPConfig: input 'backend' is gone",
    rename_input: "CPConfig: input 'ring_degree' is gone",
    change_type: "CPConfig: input 'world_size' was type 'INT', now 'FLOAT'",
    widget_becomes_socket: "CPConfig: input 'devices' was widget True, now False",
    swap_widgets: "CPConfig: widgets were in the order",
    insert_widget: "CPConfig: widgets were in the order",
    append_required: "CPConfig: new input 'new' is required",
    lose_option: "CPConfig: input 'backend' no longer has the option 'gloo'",
    narrow_range: "CPConfig: input 'world_size' allowed 0 to 1024, now 0 to 8",
    lose_control: "CPSampler: input 'seed' gained or lost control_after_generate",
    become_required: "CPSampler: input 'cp_config' was optional",
    swap_outputs: "CPSampler: output 0 was",
    change_output: "ApplyContextParallel: output 0 was",
    lose_output: "CPSampler: output 1 was",
    remove_node: "CPSampler: the node is gone, and no replacement is registered",
}


@pytest.mark.parametrize("change", BREAKING, ids=lambda change: change.__name__)
def test_what_breaks_a_workflow_is_noticed(change):
    current = copy.deepcopy(RELEASED)
    change(current)
    problems = tool.broken(RELEASED, current, {})
    assert problems
    assert any(problem.startswith(BREAKING[change]) for problem in problems), problems


def add_node(nodes):
    nodes["CPAnother"] = {"deprecated": False, "inputs": [], "outputs": []}


def append_optional(nodes):
    nodes["CPConfig"]["inputs"].append({"name": "new", "type": "INT", "optional": True, "widget": True})


def insert_optional_socket(nodes):
    nodes["CPConfig"]["inputs"].insert(0, {"name": "new", "type": "MODEL", "optional": True, "widget": False})


def append_output(nodes):
    nodes["ApplyContextParallel"]["outputs"].append({"type": "STRING", "list": False})


def more_options(nodes):
    entry(nodes["CPConfig"], "backend")["options"].insert(0, "mpi")


def widen_range(nodes):
    entry(nodes["CPConfig"], "world_size")["max"] = 4096
    del entry(nodes["CPConfig"], "step_timeout")["max"]


def change_default(nodes):
    entry(nodes["CPConfig"], "on_unsupported")["default"] = "single device"


def deprecate(nodes):
    nodes["CPSampler"]["deprecated"] = True


HARMLESS = [add_node, append_optional, insert_optional_socket, append_output, more_options, widen_range, change_default, deprecate]


@pytest.mark.parametrize("change", HARMLESS, ids=lambda change: change.__name__)
def test_what_breaks_no_workflow_passes(change):
    current = copy.deepcopy(RELEASED)
    change(current)
    assert current != RELEASED
    assert tool.broken(RELEASED, current, {}) == []


def test_a_node_may_go_when_it_is_replaced():
    current = {name: node for name, node in RELEASED.items() if name != "CPSampler"}
    replacement = {"new_node_id": "CPSampler2", "old_widget_ids": tool.widgets(RELEASED["CPSampler"])}
    replacements = {"CPSampler": [replacement]}
    assert tool.broken(RELEASED, current, tool.usable(replacements, {"CPSampler2": {}})) == []
    missing = tool.broken(RELEASED, current, tool.usable(replacements, {}))
    assert missing == ["CPSampler: the node is gone, and no replacement is registered"]
    replacement["old_widget_ids"] = None
    assert "its replacement has old_widget_ids []" in tool.broken(RELEASED, current, replacements)[0]


def test_the_widget_behind_a_seed_has_a_position():
    assert tool.widgets(RELEASED["CPSampler"])[:3] == ["seed", "control_after_generate", "steps"]
    assert tool.widgets(RELEASED["ApplyContextParallel"]) == []


def test_the_message_says_what_to_do():
    current = copy.deepcopy(RELEASED)
    swap_widgets(current)
    text = tool.advice(tool.broken(RELEASED, current, {}), VERSION, RELEASED)
    assert f"Workflows saved with {VERSION} would no longer load:" in text
    assert 'io.NodeReplace(new_node_id="...", old_node_id="CPConfig", old_widget_ids=["world_size", "devices",' in text
    assert "node_replacement.register" in text
    assert "`make definitions`" in text
