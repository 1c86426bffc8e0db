"""Help pages in the panel that Node Info opens: all of a page is inside it, at its default width and at others."""

from __future__ import annotations

from browser.canvas import point_in, show_node
from playwright.sync_api import Page, expect

NODES = {
    "CPConfig": "CP Config",
    "ApplyContextParallel": "Apply Context Parallel",
    "CPSampler": "CP Sampler",
    "CPReport": "CP Report",
}
WIDTHS = {1280: 220, 1400: 245, 2560: 480}  # of the window, and at most of the content: the panel takes a fifth by default
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


def test_nothing_is_wider_than_the_panel(page: Page) -> None:
    content = page.locator(".node-help-content")
    for kind, title in NODES.items():
        page.evaluate("kind => { app.graph.clear(); app.graph.add(LiteGraph.createNode(kind)); }", kind)
        show_node(page, kind)
        page.mouse.click(*point_in(page, kind))
        if not content.is_visible():  # once open, it shows the node that is selected
            page.get_by_test_id("info-button").click()
        expect(content.locator("h1")).to_have_text(title)
        expect(content).to_contain_text("Troubleshooting")
        page.wait_for_function("() => document.querySelector('.node-help-content img').naturalWidth > 0")
        for window, most in WIDTHS.items():
            page.set_viewport_size({"width": window, "height": 900})
            page.wait_for_function("most => document.querySelector('.node-help-content').clientWidth <= most", arg=most)
            assert 200 < content.evaluate("content => content.clientWidth") <= most
            assert content.evaluate(OVERFLOWS) == [], f"{kind} in a window of {window} pixels"
