"""Workflows that users have saved still load: the definitions on a real server against those of the newest stored release.

`.ci/definitions.py` says what is compared, and writes the file of a release. The other tests here change copies of the stored
definitions: the comparison must notice what breaks a workflow, and only that.
"""

import copy

import pytest
from support.package import ROOT, load_script

tool = load_script(ROOT / ".ci" / "definitions.py")
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


def changed(name, node="CPConfig", /, **changes):
    """Change an input."""
    return lambda nodes: entry(nodes[node], name).update(changes)


def new_input(place=None, **changes):
    """Put another input into CP Config, by default behind all others."""
    made = {"name": "new", "type": "INT", "optional": True, "widget": True, **changes}
    return lambda nodes: (inputs := nodes["CPConfig"]["inputs"]).insert(len(inputs) if place is None else place, made)


def swap_widgets(nodes):
    inputs = nodes["CPConfig"]["inputs"]
    inputs[2], inputs[3] = inputs[3], inputs[2]


BREAKING = {
    "an input is gone": (
        lambda nodes: nodes["CPConfig"]["inputs"].remove(entry(nodes["CPConfig"], "backend")),
        "CPConfig: input 'backend' is gone",
    ),
    "an input has another name": (changed("ring_degree", name="ring"), "CPConfig: input 'ring_degree' is gone"),
    "type": (changed("world_size", type="FLOAT"), "CPConfig: input 'world_size' was type 'INT', now 'FLOAT'"),
    "a widget becomes a socket": (changed("devices", widget=False), "CPConfig: input 'devices' was widget True, now False"),
    "widgets swap": (swap_widgets, "CPConfig: widgets were in the order"),
    "a widget in between": (new_input(1), "CPConfig: widgets were in the order"),
    "a new input is required": (new_input(optional=False), "CPConfig: new input 'new' is required"),
    "an option is gone": (
        lambda nodes: entry(nodes["CPConfig"], "backend")["options"].remove("gloo"),
        "CPConfig: input 'backend' no longer has the option 'gloo'",
    ),
    "a smaller range": (changed("world_size", max=8), "CPConfig: input 'world_size' allowed 0 to 1024, now 0 to 8"),
    "no control after generate": (
        changed("seed", "CPSampler", control_after_generate=False),
        "CPSampler: input 'seed' gained or lost control_after_generate",
    ),
    "an input becomes required": (changed("cp_config", "CPSampler", optional=False), "CPSampler: input 'cp_config' was optional"),
    "outputs swap": (lambda nodes: nodes["CPSampler"]["outputs"].reverse(), "CPSampler: output 0 was"),
    "type of an output": (
        lambda nodes: nodes["ApplyContextParallel"]["outputs"][0].update(type="CP_MODEL"),
        "ApplyContextParallel: output 0 was",
    ),
    "an output is gone": (lambda nodes: nodes["CPSampler"]["outputs"].pop(), "CPSampler: output 1 was"),
    "the node is gone": (lambda nodes: nodes.pop("CPSampler"), "CPSampler: the node is gone, and no replacement is registered"),
}


@pytest.mark.parametrize("case", BREAKING)
def test_what_breaks_a_workflow_is_noticed(case):
    change, words = BREAKING[case]
    current = copy.deepcopy(RELEASED)
    change(current)
    problems = tool.broken(RELEASED, current, {})
    assert problems
    assert any(problem.startswith(words) for problem in problems), problems


def widen_ranges(nodes):
    entry(nodes["CPConfig"], "world_size")["max"] = 4096
    del entry(nodes["CPConfig"], "step_timeout")["max"]


HARMLESS = {
    "another node": lambda nodes: nodes.update(CPAnother={"deprecated": False, "inputs": [], "outputs": []}),
    "a new input": new_input(),
    "a new socket in front": new_input(0, type="MODEL", widget=False),
    "a new output": lambda nodes: nodes["ApplyContextParallel"]["outputs"].append({"type": "STRING", "list": False}),
    "more options": lambda nodes: entry(nodes["CPConfig"], "backend")["options"].insert(0, "mpi"),
    "wider ranges": widen_ranges,
    "another default": changed("on_unsupported", default="single device"),
    "deprecated": lambda nodes: nodes["CPSampler"].update(deprecated=True),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
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
