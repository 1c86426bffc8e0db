"""Templates, tooltips and help as a person finds them."""

from __future__ import annotations

import pytest
from browser.canvas import box_of, load_workflow, point_in, show_node
from playwright.sync_api import expect
from support.server import CHECKOUT

NAMES = sorted(path.stem for path in (CHECKOUT / "workflows").glob("*.json"))
PACK = "comfyui-context-parallel"


def open_template(page, name):
    page.locator(".templates-tab-button").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text(PACK).first.click()
    dialog.get_by_text(name.replace("_", " "), exact=True).first.click()
    expect(dialog).to_have_count(0)
    page.wait_for_function("() => app.graph.nodes.some(node => node.type === 'ApplyContextParallel')")


def test_the_template_browser_has_them(page, picture):
    page.locator(".templates-tab-button").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text(PACK).first.click()
    for name in NAMES:
        expect(dialog.get_by_text(name.replace("_", " "), exact=True).first).to_be_visible()
    page.wait_for_timeout(1000)  # pictures
    picture("docs/images/templates.png")


@pytest.mark.parametrize("name", NAMES)
def test_a_template_opens_without_a_warning(page, name, picture):
    open_template(page, name)
    page.wait_for_timeout(1000)  # the browser looks for what is missing
    assert page.get_by_role("dialog").count() == 0
    assert page.get_by_test_id("error-overlay-see-errors").count() == 0
    assert page.evaluate("app.graph.nodes.filter(node => node.has_errors).length") == 0
    registered = page.evaluate("app.graph.nodes.map(node => [node.type, node.type in LiteGraph.registered_node_types])")
    assert [kind for kind, known in registered if not known and kind not in ("MarkdownNote", "Note")] == []

    page.set_viewport_size({"width": 2400, "height": 1300})
    page.evaluate("app.extensionManager.toggleFocusMode()")
    page.evaluate("app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    page.wait_for_timeout(1500)
    picture(f"workflows/{name}.jpg", clip=box_of(page, margin=20), width=1200)


def test_the_picture_of_the_graph(page, picture):
    """The part of the Flux template that help pages and README show."""
    load_workflow(page, "flux_context_parallel")
    page.set_viewport_size({"width": 2400, "height": 1300})
    page.evaluate("app.extensionManager.toggleFocusMode()")
    kinds = ["UNETLoader", "CPConfig", "ApplyContextParallel", "KSampler"]
    show_node(page, "ApplyContextParallel")
    page.wait_for_timeout(1500)
    image = picture("web/docs/images/graph.jpg", clip=box_of(page, kinds, margin=30), width=1000)
    assert image.width > 800


def test_tooltips(page, picture):
    load_workflow(page, "flux_context_parallel")
    show_node(page, "CPConfig")
    page.mouse.move(*point_in(page, "CPConfig", "devices"))
    tooltip = page.locator(".node-tooltip")
    expect(tooltip).to_contain_text("cuda:0,cuda:2")
    picture("docs/images/tooltip.png")


def test_help(page, picture):
    load_workflow(page, "flux_context_parallel")
    show_node(page, "CPConfig")
    page.mouse.click(*point_in(page, "CPConfig"))
    page.get_by_test_id("info-button").click()
    content = page.locator(".node-help-content")
    expect(content).to_contain_text("Which mode when")
    expect(content).to_contain_text("Troubleshooting")
    graph = content.locator("img").first
    expect(graph).to_be_visible()
    page.wait_for_function("() => document.querySelector('.node-help-content img').naturalWidth > 0")
    picture("docs/images/help.png")
