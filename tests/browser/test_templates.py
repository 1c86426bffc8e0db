"""Templates, tooltips and help as a person finds them."""

import json

import pytest
from browser.canvas import add_node, box_of, point_in, show_node
from browser.conftest import MADE_UP_GPUS
from browser.test_first_run import ALL_IN_VIEW, SHOWN
from playwright.sync_api import expect
from support.graphs import flux_prompt
from support.server import CHECKOUT

CATEGORY = "Context Parallel"
"""The folder's name would be cut off there."""
OPENED = ("Flux on all GPUs", "GGUF on all GPUs", "MiniMax-H3 image to video on all GPUs")
"""One of ComfyUI's nodes, one with nodes of another pack, one with nodes that moved; the server's tests check all."""
NAMES = sorted(path.stem for path in (CHECKOUT / "workflows").glob("*.json"))


def open_template(page, name):
    page.locator(".templates-tab-button").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text(CATEGORY, exact=True).first.click()
    dialog.get_by_text(name, exact=True).first.click()
    expect(dialog).to_have_count(0)
    page.wait_for_function("() => app.graph.nodes.some(node => node.type === 'ApplyContextParallel')")


def test_the_template_browser_has_them(page, picture):
    """Under a name of their own, and for the search under All Templates: it looks through the list that is open."""
    page.locator(".templates-tab-button").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_placeholder("Search").fill("all GPUs")
    dialog.get_by_text("All Templates").first.click()
    expect(dialog.get_by_text(NAMES[0], exact=True).first).to_be_visible()
    dialog.get_by_text(CATEGORY, exact=True).first.click()
    dialog.get_by_placeholder("Search").fill("")
    for name in NAMES:
        expect(dialog.get_by_text(name, exact=True).first).to_be_visible()
    picture("shots/templates.png", settle=1000)
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in OPENED else pytest.mark.soak) for name in NAMES])
def test_a_template_opens_without_a_warning(page, name):
    open_template(page, name)
    page.wait_for_timeout(1000)  # the browser looks for what is missing
    assert page.get_by_role("dialog").count() == 0
    assert page.get_by_test_id("error-overlay-see-errors").count() == 0
    assert page.evaluate("app.graph.nodes.filter(node => node.has_errors).length") == 0
    page.wait_for_function(ALL_IN_VIEW)
    assert page.evaluate("app.canvas.ds.scale") > 0.4
    registered = page.evaluate("app.graph.nodes.map(node => [node.type, node.type in LiteGraph.registered_node_types])")
    assert [kind for kind, known in registered if not known and kind not in ("MarkdownNote", "Note")] == []


def test_a_template_whose_node_pack_is_missing(page):
    """ComfyUI says what is missing, by the name of the node, which the canvas alone does not put into the page."""
    kind = page.evaluate_handle("() => LiteGraph.registered_node_types.UnetLoaderGGUF")
    page.evaluate("LiteGraph.unregisterNodeType('UnetLoaderGGUF')")
    assert page.get_by_text("UnetLoaderGGUF").count() == 0
    open_template(page, "GGUF on all GPUs")
    expect(page.get_by_text("UnetLoaderGGUF").first).to_be_visible()
    kind.evaluate("kind => LiteGraph.registerNodeType('UnetLoaderGGUF', kind)")


def test_the_report(page, picture):
    """CP Sampler and CP Report, run by the Queue button."""
    prompt = flux_prompt(node="CPSampler", width=512, height=512, steps=8, cp={"world_size": 2})
    prompt["report"] = {"class_type": "CPReport", "inputs": {"report": ["sampler", 1]}, "_meta": {"title": "CP Report"}}
    page.evaluate("prompt => app.loadApiJson(prompt, 'report')", prompt)
    page.evaluate(
        """() => {
            const find = kind => app.graph.nodes.find(node => node.type === kind);
            const [sampler, report] = [find("CPSampler"), find("CPReport")];
            report.pos = [sampler.pos[0] + sampler.size[0] + 60, sampler.pos[1]];
            report.setSize([520, 420]);
            find("CPConfig").pos = [sampler.pos[0] - 320, sampler.pos[1] + 60];
            find("ApplyContextParallel").pos = [sampler.pos[0] - 320, sampler.pos[1] - 60];
            for (const node of app.graph.nodes)
                if (!["CPSampler", "CPReport", "CPConfig", "ApplyContextParallel"].includes(node.type)) node.pos[0] -= 3000;
        }"""
    )
    page.set_viewport_size({"width": 1800, "height": 1000})
    page.evaluate("app.extensionManager.toggleFocusMode()")
    show_node(page, "CPSampler")
    page.evaluate("app.api.fetchApi('/context_parallel/measure', { method: 'POST' })")
    page.evaluate("app.queuePrompt(0)")
    page.wait_for_function("() => app.graph.nodes.find(node => node.type === 'CPReport').imgs?.length", timeout=120_000)
    expect(page.get_by_text("rank 1 on cpu")).to_have_count(0)  # it stands in the picture
    kinds = ["ApplyContextParallel", "CPConfig", "CPSampler", "CPReport"]
    picture("web/docs/images/report.jpg", settle=1000, clip=lambda: box_of(page, kinds, margin=20), width=1000)


def test_tooltips(page, picture):
    add_node(page, "CPConfig")
    page.mouse.move(*point_in(page, "CPConfig", "devices"))
    tooltip = page.locator(".node-tooltip")
    expect(tooltip).to_contain_text("cuda:0,cuda:2")
    picture("shots/tooltip.png")


LABELS = json.loads((CHECKOUT / "locales" / "en" / "nodeDefs.json").read_text())["CPConfig"]["inputs"]
OFTEN = ("world_size", "devices", "on_unsupported", "weights")
FOLDED = ("ulysses_degree", "rotate_method", "step_timeout", "memory_per_rank", "exchange")


@pytest.mark.parametrize("page", [{"Comfy.VueNodes.Enabled": True}], indirect=True)
def test_advanced_inputs_are_folded_away(page, picture):
    """By the frontend's new nodes themselves; one that is set is shown."""
    add_node(page, "CPConfig")
    node = page.locator("[data-node-id]", has=page.get_by_text("CP Config", exact=True))
    label = node.get_by_test_id("widget-layout-field-label")
    for name in OFTEN:
        expect(label.get_by_text(LABELS[name]["name"], exact=True)).to_be_visible()
    for name in FOLDED:
        expect(label.get_by_text(LABELS[name]["name"], exact=True)).to_be_hidden()
    for _ in "new", "loaded":  # as after Undo
        assert node.bounding_box()["height"] < 280  # no empty space for what is folded away
        page.evaluate("() => app.loadGraphData(app.graph.serialize())")
        page.wait_for_timeout(500)
    picture("shots/folded.png")
    page.evaluate("() => { app.graph.nodes[0].widgets.find(({ name }) => name === 'ring_degree').value = 2 }")
    expect(label.get_by_text(LABELS["ring_degree"]["name"], exact=True)).to_be_visible()
    node.get_by_text("Show advanced inputs").click()
    for name in FOLDED:
        expect(label.get_by_text(LABELS[name]["name"], exact=True)).to_be_visible()


COPIES = {
    "Alt and drag": "() => app.graph.add(app.graph.nodes[0].clone())",
    "Ctrl+C, Ctrl+V": """() => {
        app.canvas.selectItems([app.graph.nodes[0]]);
        app.canvas.copyToClipboard();
        app.canvas.pasteFromClipboard();
    }""",
    "as the API has it": "async () => app.loadApiJson((await app.graphToPrompt()).output, 'mine')",
}


def test_advanced_inputs_are_folded_away_on_the_canvas(page):
    """A button shows them; a workflow that sets one shows this one by itself, and one that was saved before has its values."""
    add_node(page, "CPConfig")
    assert page.evaluate(SHOWN) == [*OFTEN, "Advanced inputs"]
    height = page.evaluate("app.graph.nodes[0].size[1]")
    page.mouse.click(*point_in(page, "CPConfig", "Advanced inputs"))
    assert {*OFTEN, *FOLDED} < {*page.evaluate(SHOWN)}
    assert page.evaluate("app.graph.nodes[0].size[1]") > height + 100
    saved = page.evaluate("() => app.graph.serialize()")
    del saved["nodes"][0]["showAdvanced"]  # as any that was saved folded
    page.evaluate("graph => app.loadGraphData(graph)", saved)
    assert page.evaluate(SHOWN) == [*OFTEN, "Advanced inputs"]
    values = saved["nodes"][0]["widgets_values"]
    values[2], saved["nodes"][0]["size"][1] = 4, height
    page.evaluate("graph => app.loadGraphData(graph)", saved)
    assert {*page.evaluate(SHOWN)} == {*OFTEN, "ulysses_degree", "Advanced inputs"}
    assert height < page.evaluate("app.graph.nodes[0].size[1]") < height + 40
    for way, copy in COPIES.items():
        page.evaluate(copy)
        page.evaluate("() => { while (app.graph.nodes.length > 1) app.graph.remove(app.graph.nodes[0]) }")
        assert {*page.evaluate(SHOWN)} == {*OFTEN, "ulysses_degree", "Advanced inputs"}, way
        page.wait_for_function("height => app.graph.nodes[0].size[1] > height", arg=height)
    queued = page.evaluate("async () => (await app.graphToPrompt()).output")
    ((_, node),) = queued.items()
    assert list(node["inputs"].values()) == [value for value in values if value is not None]
    assert "Advanced inputs" not in node["inputs"]


def add_config_with_choice(page):
    add_node(page, "CPConfig")
    page.wait_for_function("() => app.graph.nodes[0].widgets.some(widget => widget.name === 'Choose devices…')")
    show_node(page, "CPConfig")


@MADE_UP_GPUS
def test_devices_can_be_picked(page):
    """From what the machine has. All of them are no choice."""
    add_config_with_choice(page)
    chosen = "app.graph.nodes[0].widgets.find(widget => widget.name === 'devices').value"
    page.mouse.click(*point_in(page, "CPConfig", "Choose devices…"))
    page.locator(".litecontextmenu").get_by_text("cuda:1 RTX 3090 24 GB").click()
    assert page.evaluate(chosen) == "cuda:0,cuda:2"
    page.locator(".litecontextmenu").get_by_text("☐ cuda:1 RTX 3090 24 GB").click()
    assert page.evaluate(chosen) == ""
    page.keyboard.press("Escape")


@MADE_UP_GPUS
def test_picking_devices_leaves_other_computers_alone(page):
    """A name is text, whatever a workflow has there. The number of GPUs goes: it would contradict the names."""
    add_config_with_choice(page)
    values = "app.graph.nodes[0].widgets.slice(0, 2).map(widget => widget.value)"
    set_both = "text => app.graph.nodes[0].widgets.slice(0, 2).forEach((widget, at) => { widget.value = [4, text][at]; })"
    page.evaluate(set_both, "cuda:0,cuda:1,gpubox/cuda:0,<hr>")
    page.mouse.click(*point_in(page, "CPConfig", "Choose devices…"))
    menu = page.locator(".litecontextmenu")
    expect(menu.get_by_text("not found on this computer")).to_be_visible()
    expect(menu.locator("hr")).to_have_count(0)
    menu.get_by_text("☑ cuda:1 RTX 3090 24 GB").click()
    assert page.evaluate(values) == [0, "cuda:0,<hr>,gpubox/cuda:0"]
    menu.get_by_text("☑ gpubox/cuda:0").click()
    assert page.evaluate(values) == [0, "cuda:0,<hr>"]
    menu.get_by_text("☐ gpubox/cuda:0").click()
    assert page.evaluate(values) == [0, "cuda:0,<hr>,gpubox/cuda:0"]
    page.keyboard.press("Escape")


def test_help(page, picture):
    add_node(page, "CPConfig")
    page.mouse.click(*point_in(page, "CPConfig"))
    page.get_by_test_id("info-button").click()
    content = page.locator(".node-help-content")
    expect(content).to_contain_text("Choosing a mode")
    expect(content).to_contain_text("Troubleshooting")
    graph = content.locator("img").first
    expect(graph).to_be_visible()
    page.wait_for_function("() => document.querySelector('.node-help-content img').naturalWidth > 0")
    picture("shots/help.png")
