"""The cards of the devices in the panel: before anything has run, from what the machine has or from what is made up here."""

import pytest
from browser.conftest import KEEP, MADE_UP_GPUS, THEME, THEMES
from playwright.sync_api import expect
from support.graphs import flux_prompt

DEVICES = "/context_parallel/devices"
TELL = "status => app.api.dispatchCustomEvent('context_parallel.status', status)"
CONFIG = "app.graph.nodes.find(node => node.type === 'CPConfig').widgets.slice(0, 2).map(widget => widget.value)"


@pytest.fixture
def cards(panel):
    """The cards of the devices."""
    return panel.locator(".cp-devices")


def opened(cards):
    if not cards.evaluate("element => element.open"):
        cards.locator("summary").click()


def test_cpu_ranks_are_for_trying_out(browser_server, cards):
    """As everybody sees it who has no GPU, with the reason; a switch is kept by the server and starts nothing."""
    pids = browser_server.worker_pids()
    opened(cards)
    expect(cards.locator("summary")).to_have_text("Devices: 2 of 2")
    expect(cards.locator("[data-device]")).to_have_text([f"Process {i}CPU, for trying out" for i in range(2)])
    expect(cards).to_contain_text("ComfyUI was started with --cpu.")
    expect(cards).to_contain_text("Used by workflows without CP Config.")
    first, second = cards.get_by_role("switch").all()
    first.click()
    expect(cards.locator("summary")).to_have_text("Devices: 1 of 2")
    assert browser_server.status()["settings"]["devices"] == "cpu:1"
    expect(second).to_be_disabled()  # one stays
    first.click()
    expect(second).to_be_enabled()
    assert browser_server.status()["settings"]["devices"] == ""
    assert browser_server.worker_pids() == pids


@MADE_UP_GPUS
def test_gpus_have_names_memory_links_and_a_switch_that_writes_cp_config(browser_server, page, cards, picture):
    opened(cards)
    expect(cards.locator("[data-device]")).to_have_text(["GPU 0RTX 409024 GB", "GPU 1RTX 309024 GB", "GPU 2RTX 309024 GB"])
    expect(cards).to_contain_text("Through the computer's memory, which is slower: GPU 0 – GPU 1.")
    for theme in THEMES if KEEP else ():
        page.evaluate(THEME, theme)
        picture(f"shots/panel-devices-{theme}.png", settle=300)
    page.evaluate("prompt => app.loadApiJson(prompt, 'test')", flux_prompt(cp={"world_size": 2}))
    page.evaluate("() => app.loadGraphData(app.graph.serialize())")
    expect(cards).to_contain_text("Set in CP Config of this workflow.")
    expect(cards).not_to_contain_text("Expected of")  # cards of different kinds
    switches = cards.get_by_role("switch")
    expect(cards.locator("summary")).to_have_text("Devices: 2 of 3")
    expect(switches.nth(2)).not_to_be_checked()
    switches.nth(2).click()
    assert page.evaluate(CONFIG) == [0, ""]  # all of them
    switches.nth(0).focus()
    page.keyboard.press("Space")
    expect(cards.locator("summary")).to_have_text("Devices: 2 of 3")
    assert page.evaluate(CONFIG) == [0, "cuda:1,cuda:2"]
    page.evaluate(TELL, {**browser_server.status(), "speed": None})
    expect(cards).to_contain_text(
        "Expected of 2 GPUs, before anything is measured: pictures 1.6, long videos 2.0 × as fast as on one"
    )
    page.evaluate(TELL, browser_server.status())
    page.evaluate("() => app.graph.add(LiteGraph.createNode('CPConfig'))")
    page.evaluate("() => app.api.dispatchCustomEvent('graphChanged', {})")
    expect(cards).to_contain_text("The CP Config nodes of this workflow differ")
    expect(switches.nth(1)).to_be_disabled()
