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
    "type": (changed("world_size", type="FLOAT"), "CPConfig: input 'world_size' was type 'INT', now 'FLOAT'"),
    "widgets swap": (swap_widgets, "CPConfig: widgets were in the order"),
    "a new input is required": (new_input(optional=False), "CPConfig: new input 'new' is required"),
    "an option is gone": (
        lambda nodes: entry(nodes["CPConfig"], "backend")["options"].remove("gloo"),
        "CPConfig: input 'backend' no longer has the option 'gloo'",
    ),
    "a smaller range": (changed("world_size", max=8), "CPConfig: input 'world_size' allowed 0 to 1024, now 0 to 8"),
    "an input becomes required": (changed("cp_config", "CPSampler", optional=False), "CPSampler: input 'cp_config' was optional"),
    "outputs swap": (lambda nodes: nodes["CPSampler"]["outputs"].reverse(), "CPSampler: output 0 was"),
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


def test_a_node_may_go_when_it_is_replaced():
    current = {name: node for name, node in RELEASED.items() if name != "CPSampler"}
    replacement = {"new_node_id": "CPSampler2", "old_widget_ids": tool.widgets(RELEASED["CPSampler"])}
    replacements = {"CPSampler": [replacement]}
    assert tool.broken(RELEASED, current, tool.usable(replacements, {"CPSampler2": {}})) == []
    missing = tool.broken(RELEASED, current, tool.usable(replacements, {}))
    assert missing == ["CPSampler: the node is gone, and no replacement is registered"]
    replacement["old_widget_ids"] = None
    assert "its replacement has old_widget_ids []" in tool.broken(RELEASED, current, replacements)[0]
