"""How nodes look on ComfyUI's canvas."""

from __future__ import annotations

import pytest
from support.graphs import flux_prompt

WIDTH = "() => app.graph.nodes.find(node => node.type === 'ApplyContextParallel').size[0]"


def test_a_new_node_is_wide_enough_for_its_title(page):
    page.evaluate("prompt => app.loadApiJson(prompt, 'test')", flux_prompt(cp={}))
    page.wait_for_timeout(500)
    assert page.evaluate(WIDTH) >= 240


@pytest.mark.parametrize("width", [190, 400])
def test_a_saved_width_stays(page, width):
    page.evaluate("prompt => app.loadApiJson(prompt, 'test')", flux_prompt(cp={}))
    graph = page.evaluate("() => app.graph.serialize()")
    node = next(node for node in graph["nodes"] if node["type"] == "ApplyContextParallel")
    node["size"] = [width, node["size"][1]]
    page.evaluate("graph => app.loadGraphData(graph)", graph)
    page.wait_for_timeout(500)
    assert page.evaluate(WIDTH) == width
