"""How nodes look on ComfyUI's canvas."""

import pytest
from playwright.sync_api import expect
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


def test_a_wrong_setting_is_named_where_a_person_looks(browser_server, page):
    """In the message that Run brings, and on the node; nothing is queued."""
    page.evaluate("prompt => app.loadApiJson(prompt, 'test')", flux_prompt(cp={"devices": "cuda:7"}))
    page.get_by_test_id("queue-button").first.click()
    said = page.get_by_test_id("error-overlay-messages")
    expect(said).to_contain_text(
        "CP Config couldn't validate cp_config: devices: Leave it empty to use the first ones. Got 'cuda:7';"
    )
    assert page.evaluate("app.graph.nodes.filter(node => node.has_errors).map(node => node.type)") == ["CPConfig"]
    assert browser_server.get("/prompt")["exec_info"]["queue_remaining"] == 0
    page.get_by_test_id("error-overlay-dismiss").click()


WORDS = ("faster", "two gpus", "nvlink", "多卡", "显存", "並列", "遅い")
"""Enter takes what stands first, and CP Config alone does nothing."""
TERMS = ("multi gpu", "out of memory", "low vram")
"""Which other nodes have in their names, or nearly so."""
FIRST = 3  # what the search shows without scrolling or reading on


def test_found_by_the_words_that_people_type(page):
    """In the search that a double click on the canvas opens."""
    page.evaluate("app.extensionManager.command.execute('Workspace.SearchBox.Toggle')")
    field, option, late = page.get_by_placeholder("Add a node..."), page.get_by_test_id("result-item"), {}
    for word in (*WORDS, *TERMS):
        field.fill(word)
        page.wait_for_timeout(500)  # it waits for the next letter
        found = option.all_inner_texts()
        place = next((i for i, text in enumerate(found) if "Apply Context Parallel" in text), None)
        if place is None or place >= (FIRST if word in TERMS else 1):
            late[word] = place, [text.partition("\n")[0] for text in found[:FIRST]]
    page.keyboard.press("Escape")
    assert not late
