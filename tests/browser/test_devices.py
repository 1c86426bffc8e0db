"""The cards of the devices in the panel: before anything has run, from what the machine has or from what is made up here."""

import pytest
from browser.conftest import FOUND, KEEP, MADE_UP_GPUS, THEME, THEMES
from playwright.sync_api import expect
from support.graphs import flux_prompt

DEVICES = "/context_parallel/devices"
TELL = "status => app.api.dispatchCustomEvent('context_parallel.status', status)"
ALONE = {"case": "single", "variable": "", "value": "", "words": ""}
ONE_GPU = {**FOUND, "devices": FOUND["devices"][:1], "indirect": []}
CONFIG = "app.graph.nodes.find(node => node.type === 'CPConfig').widgets.slice(0, 2).map(widget => widget.value)"


@pytest.fixture
def cards(panel):
    """The cards of the devices."""
    return panel.locator(".cp-devices")


@pytest.fixture
def config(page):
    """Opens a workflow whose CP Config names these devices."""

    def load(devices):
        page.evaluate("prompt => app.loadApiJson(prompt, 'test')", flux_prompt(cp={"devices": devices}))
        page.evaluate("() => app.loadGraphData(app.graph.serialize())")

    return load


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
    switches = cards.get_by_role("switch")
    expect(cards.locator("summary")).to_have_text("Devices: 2 of 3")
    expect(switches.nth(2)).not_to_be_checked()
    switches.nth(2).click()
    assert page.evaluate(CONFIG) == [0, ""]  # all of them
    switches.nth(0).focus()
    page.keyboard.press("Space")
    expect(cards.locator("summary")).to_have_text("Devices: 2 of 3")
    assert page.evaluate(CONFIG) == [0, "cuda:1,cuda:2"]
    page.evaluate("() => app.graph.add(LiteGraph.createNode('CPConfig'))")
    page.evaluate("() => app.api.dispatchCustomEvent('graphChanged', {})")
    expect(cards).to_contain_text("The CP Config nodes of this workflow differ")
    expect(switches.nth(1)).to_be_disabled()


@MADE_UP_GPUS
def test_devices_of_other_computers_stay_behind_those_of_this_one(browser_server, page, cards, config):
    """Also the last of a list that is all on, which alone would be an empty text. They have switches of their own."""
    config("gpubox/cuda:1, cuda:0,tower/cuda:0,cuda,cuda:2, gpubox/cuda:0")
    opened(cards)
    far = ["GPU 1 (gpubox)gpubox/cuda:1", "GPU 0 (tower)tower/cuda:0", "GPU 0 (gpubox)gpubox/cuda:0"]
    expect(cards.locator("[data-device]")).to_have_text(["GPU 0RTX 409024 GB", "GPU 1RTX 309024 GB", "GPU 2RTX 309024 GB", *far])
    expect(cards.locator("summary")).to_have_text("Devices: 5 of 6")
    expect(cards).not_to_contain_text("Through the computer's memory")
    switches = cards.get_by_role("switch")
    behind = "gpubox/cuda:1,tower/cuda:0,gpubox/cuda:0"
    switches.nth(2).click()
    assert page.evaluate(CONFIG) == [0, f"cuda:0,{behind}"]
    expect(switches.nth(0)).to_be_disabled()  # one of this computer stays
    switches.nth(1).click()
    switches.nth(2).click()
    assert page.evaluate(CONFIG) == [0, f"cuda:0,cuda:1,cuda:2,{behind}"]
    switches.nth(4).focus()
    page.keyboard.press("Space")
    assert page.evaluate(CONFIG) == [0, "cuda:0,cuda:1,cuda:2,gpubox/cuda:1,gpubox/cuda:0"]
    expect(cards.locator("summary")).to_have_text("Devices: 5 of 6")
    page.keyboard.press("Space")  # it can be put back
    assert page.evaluate(CONFIG) == [0, "cuda:0,cuda:1,cuda:2,gpubox/cuda:1,gpubox/cuda:0,tower/cuda:0"]
    config("")
    expect(switches).to_have_count(3)


@MADE_UP_GPUS
def test_devices_that_this_computer_lacks_are_named_until_they_are_switched_off(page, cards, config):
    config("cuda:7,cuda:1")
    opened(cards)
    switches = cards.get_by_role("switch")
    expect(cards.locator("[data-device='cuda:7']")).to_have_text("GPU 7not found on this computer")
    switches.nth(0).click()
    assert page.evaluate(CONFIG) == [0, "cuda:0,cuda:1,cuda:7"]
    switches.nth(3).click()
    assert page.evaluate(CONFIG) == [0, "cuda:0,cuda:1"]
    config("gpubox/cuda:0")  # the server wants one of this computer
    expect(cards.locator("summary")).to_have_text("Devices: 1 of 4")
    switches.nth(1).click()
    assert page.evaluate(CONFIG) == [0, "cuda:1,gpubox/cuda:0"]


@MADE_UP_GPUS
def test_workflows_that_differ_in_other_computers_only_differ(page, cards, config):
    config("cuda:0,gpubox/cuda:0")
    opened(cards)
    expect(cards).to_contain_text("Set in CP Config of this workflow.")
    page.evaluate(
        """() => {
            app.graph.add(LiteGraph.createNode('CPConfig'));
            app.graph.nodes.at(-1).widgets.find(widget => widget.name === 'devices').value = 'cuda:0';
            app.api.dispatchCustomEvent('graphChanged', {});
        }"""
    )
    expect(cards).to_contain_text("The CP Config nodes of this workflow differ")
    expect(cards.locator("[data-device='gpubox/cuda:0']").get_by_role("switch")).to_be_disabled()


@pytest.mark.parametrize("page", [{"/context_parallel/devices": ONE_GPU}], ids=["one"], indirect=True)
def test_one_gpu_is_not_alone_with_that_of_another_computer(browser_server, page, panel, cards, config):
    status = {**browser_server.status(), "alone": ALONE, "state": "off"}
    page.evaluate(TELL, status)
    opened(cards)
    use = panel.get_by_role("button", name="Use one GPU again")
    expect(panel).to_contain_text("1 GPU visible, nothing to share.")
    expect(use).to_be_hidden()
    config("cuda:0,gpubox/cuda:0")
    page.evaluate(TELL, status)
    expect(use).to_be_visible()
    expect(panel).not_to_contain_text("nothing to share")
    expect(cards).to_contain_text("Set in CP Config of this workflow.")
    expect(cards.locator("summary")).to_have_text("Devices: 2 of 2")
    page.evaluate(TELL, browser_server.status())


@MADE_UP_GPUS
def test_use_all_gpus_counts_those_of_other_computers(page, config):
    config("cuda:0,gpubox/cuda:0")
    for said in ("This workflow uses one GPU again.", "1 sampler now uses 2 devices. Press Run."):
        page.evaluate("() => app.extensionManager.command.execute('ContextParallel.UseAllGPUs')")
        expect(page.locator(".p-toast-message").filter(has_text=said)).to_be_visible()


def test_a_rank_of_another_computer_is_named_after_both(browser_server, page, panel):
    rank = {"state": "idle", "culprit": False, "idle": False, "memory": {"host": 0, "device": 0}, "tokens": {}, "pid": 1}
    devices = ("cuda:1", "gpubox/cuda:1", "gpubox/cuda", "tower/cpu")
    ranks = [{**rank, "rank": at, "device": device} for at, device in enumerate(devices)]
    page.evaluate(TELL, {**browser_server.status(), "state": "idle", "world_size": 4, "ranks": ranks})
    names = ["GPU 1", "GPU 1 (gpubox)", "GPU 0 (gpubox)", "Process 3 (tower)"]
    expect(panel.locator(".cp-body strong")).to_have_text(names)
    page.evaluate(TELL, browser_server.status())
