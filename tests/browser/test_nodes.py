"""How nodes look on ComfyUI's canvas."""

from __future__ import annotations

import pytest
from support.graphs import flux_prompt

SIZE = "kind => [...app.graph.nodes.find(node => node.type === kind).size]"


def load(page):
    prompt = flux_prompt(node="CPSampler", cp={})
    prompt["report"] = {"class_type": "CPReport", "inputs": {"report": ["sampler", 1]}}
    page.evaluate("prompt => app.loadApiJson(prompt, 'test')", prompt)
    page.wait_for_timeout(500)


def test_new_nodes_are_large_enough(page):
    """For the title of one, and the text and bars of the other."""
    load(page)
    assert page.evaluate(SIZE, "ApplyContextParallel")[0] >= 240
    width, height = page.evaluate(SIZE, "CPReport")
    assert width >= 440
    assert height >= 380


@pytest.mark.parametrize("width", [190, 400])
def test_a_saved_width_stays(page, width):
    load(page)
    graph = page.evaluate("() => app.graph.serialize()")
    for node in graph["nodes"]:
        node["size"] = [width, node["size"][1]]
    page.evaluate("graph => app.loadGraphData(graph)", graph)
    page.wait_for_timeout(500)
    assert [page.evaluate(SIZE, kind)[0] for kind in ("ApplyContextParallel", "CPReport")] == [width, width]
