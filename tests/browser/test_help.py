"""Nodes, and their help pages in the panel that Node Info opens, in other languages. Help in English: `test_templates.py`."""

import json

import pytest
from browser.canvas import add_node, point_in
from playwright.sync_api import Page, expect
from support.server import CHECKOUT


def open_help(page: Page, kind: str, language: str) -> None:
    """Select a new node and read its page, which must be there in the language: the frontend asks for that first."""
    content = page.locator(".node-help-content")
    with page.expect_response(f"**/docs/{kind}/{language}.md") as answer:
        add_node(page, kind)
        page.mouse.click(*point_in(page, kind))
        if not content.is_visible():  # once open, it shows the node that is selected
            page.get_by_test_id("info-button").click()
    assert answer.value.status < 400
    page.wait_for_function("() => document.querySelector('.node-help-content img')?.naturalWidth > 0")


LANGUAGE, BUTTON = "zh", "高级输入"


@pytest.mark.parametrize("page", [{"Comfy.Locale": LANGUAGE}], ids=[LANGUAGE], indirect=True)
def test_another_language(page: Page) -> None:
    """Title, tooltip, our button and the help page. `tests/server/test_help.py` compares the texts of all languages.

    The page is loaded in the language: where it is chosen later, ComfyUI loads its texts, the nodes and the graph again by and by,
    and nothing says when it is done.
    """
    with page.expect_response("**/context_parallel/language") as told:  # so that the texts under nodes are in the language too
        page.evaluate("app.api.dispatchCustomEvent('reconnected')")
    assert told.value.request.post_data_json == {"client": page.evaluate("app.api.clientId"), "language": LANGUAGE}
    assert told.value.status == 200
    texts = json.loads((CHECKOUT / "locales" / LANGUAGE / "nodeDefs.json").read_text())["CPConfig"]
    add_node(page, "CPConfig")
    assert BUTTON in page.evaluate("app.graph.nodes[0].widgets.map(widget => widget.name)")
    page.mouse.move(*point_in(page, "CPConfig", "devices"))
    expect(page.locator(".node-tooltip")).to_have_text(texts["inputs"]["devices"]["tooltip"])
    assert page.evaluate("LiteGraph.registered_node_types.CPConfig.title") == texts["display_name"]
    open_help(page, "CPConfig", LANGUAGE)
    content = page.locator(".node-help-content")
    expect(content.locator("h1")).to_have_text(texts["display_name"])
    expect(content).not_to_contain_text("**")  # which is not bold everywhere between Chinese characters
