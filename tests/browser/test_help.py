"""Help pages in the panel that Node Info opens: all of a page is inside it, at its default width and at others; other languages."""

import json

import pytest
from browser.canvas import add_node, point_in
from playwright.sync_api import Page, expect
from support.server import CHECKOUT

NODES = {
    "CPConfig": "CP Config",
    "CPVAEDecode": "CP VAE Decode",
}
WIDTHS = {1280: 220, 2560: 480}  # of the window, and at most of the content: the panel takes a fifth by default
OVERFLOWS = """content => {
    const right = content.getBoundingClientRect().right;
    const cut = part => part.scrollWidth > part.clientWidth && getComputedStyle(part).display !== "inline";
    const parts = [...content.querySelectorAll("*")];
    const wide = parts.filter(part => cut(part) || part.getBoundingClientRect().right > right + 0.5);
    for (let part = content; part; part = part.parentElement) if (cut(part)) wide.push(part);
    const name = part => `${part.tagName} ${part.className}`;
    return wide.map(part => `${name(part)} ${part.scrollWidth} > ${part.clientWidth}: ${part.textContent.slice(0, 40)}`);
}"""
"""Parts of the page that are wider than there is room, and boxes around it that have to be scrolled sideways."""


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


def test_nothing_is_wider_than_the_panel(page: Page) -> None:
    content = page.locator(".node-help-content")
    for kind, title in NODES.items():
        open_help(page, kind, "en")
        expect(content.locator("h1")).to_have_text(title)
        expect(content).to_contain_text("Troubleshooting")
        for window, most in WIDTHS.items():
            page.set_viewport_size({"width": window, "height": 900})
            page.wait_for_function("most => document.querySelector('.node-help-content').clientWidth <= most", arg=most)
            assert 200 < content.evaluate("content => content.clientWidth") <= most
            assert content.evaluate(OVERFLOWS) == [], f"{kind} in a window of {window} pixels"


@pytest.mark.parametrize(
    ("page", "language", "button"),
    [
        ({"Comfy.Locale": "zh"}, "zh", "高级输入"),
        pytest.param({"Comfy.Locale": "ja"}, "ja", "詳細な入力", marks=pytest.mark.soak),
    ],
    ids=["zh", "ja"],
    indirect=["page"],
)
def test_other_languages(page: Page, language: str, button: str) -> None:
    """Title, tooltip, our button and the help page.

    The page is loaded in the language: where it is chosen later, ComfyUI loads its texts, the nodes and the graph again by and by,
    and nothing says when it is done.
    """
    texts = json.loads((CHECKOUT / "locales" / language / "nodeDefs.json").read_text())["CPConfig"]
    add_node(page, "CPConfig")
    assert button in page.evaluate("app.graph.nodes[0].widgets.map(widget => widget.name)")
    page.mouse.move(*point_in(page, "CPConfig", "devices"))
    expect(page.locator(".node-tooltip")).to_have_text(texts["inputs"]["devices"]["tooltip"])
    assert page.evaluate("LiteGraph.registered_node_types.CPConfig.title") == texts["display_name"]
    open_help(page, "CPConfig", language)
    content = page.locator(".node-help-content")
    expect(content.locator("h1")).to_have_text(texts["display_name"])
    expect(content).not_to_contain_text("**")  # which is not bold everywhere between Chinese characters
    assert content.evaluate(OVERFLOWS) == []
