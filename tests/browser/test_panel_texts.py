"""What the status panel shows of a status that it is told, in three languages and a small window."""

import itertools
import re
import time

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser.conftest import CP
from playwright.sync_api import expect
from support.graphs import flux_prompt

TRANSLATED = ".cp-speed, .cp-headline, .cp-activity, .cp-error strong, .cp-state, button, summary"
TIGHT = """panel => {
    const inside = panel.getBoundingClientRect(), texts = [], wrong = [];
    const walk = document.createTreeWalker(panel, NodeFilter.SHOW_TEXT);
    for (let node = walk.nextNode(); node; node = walk.nextNode()) {
        if (!node.parentElement.checkVisibility() || node.parentElement.tagName === 'PRE') continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        for (const box of range.getClientRects()) texts.push([node, box]);
    }
    for (const [node, box] of texts) {
        if (box.left < inside.left || box.right > inside.right) wrong.push(`${node.data} sticks out`);
        for (const [other, its] of texts) {
            const across = Math.min(box.right, its.right) - Math.max(box.left, its.left);
            const down = Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top);
            if (node !== other && across > 1 && down > 6) wrong.push(`${node.data} lies on ${other.data}`);
        }
    }
    if (panel.scrollWidth > panel.clientWidth) wrong.push(`${panel.scrollWidth} pixels wide`);
    return wrong;
}"""
"""Texts that do not fit into the panel's width."""


MUTE = """() => {
    const send = EventTarget.prototype.dispatchEvent;
    EventTarget.prototype.dispatchEvent = function (event) {
        return (event.type === 'context_parallel.status' && !event.detail.told) || send.call(this, event);
    };
    return () => { EventTarget.prototype.dispatchEvent = send; };
}"""
"""Keeps the server's events from the page until what it returns is called."""
TELL = "status => app.api.dispatchCustomEvent('context_parallel.status', status)"


@pytest.fixture
def tell(browser_server, page, panel):
    """Gives the panel the server's status with changes, as an event of the server does; those do not reach it meanwhile."""
    browser_server.run(flux_prompt(cp=CP)).check()
    speak = page.evaluate_handle(MUTE)
    status = {**browser_server.get("/context_parallel/status"), "told": True}

    def send(**changes):
        page.evaluate(TELL, {**status, **changes})

    send.status = status
    yield send
    speak.evaluate("speak => speak()")
    page.evaluate(TELL, browser_server.get("/context_parallel/status"))


LOOKS = (("zh", "light"), ("ja", "dark"), ("en", "light"))


@pytest.fixture
def look(page, tab):
    """Chooses a language and a theme. There may be no font for the language, so letters are set as wide as those of one."""

    def choose(language, theme):
        for name, value in (("Comfy.Locale", language), ("Comfy.ColorPalette", theme)):
            page.evaluate("([name, value]) => app.extensionManager.setting.set(name, value)", [name, value])
        wide = "normal" if language == "en" else "0.5em"
        page.evaluate("wide => document.documentElement.style.setProperty('letter-spacing', wide)", wide)

    yield choose
    tab.spoil()  # ComfyUI goes on for a while to load what a language asks for, the graph included


def open_details(panel):
    panel.locator(".cp-details > summary").click()
    expect(panel.locator(".cp-details > .cp-lists")).to_be_visible()


ERROR_TIMES = itertools.count(10**9)  # each is another error


def an_error(**changes):
    """What a status says about the last one."""
    message = "\n".join(f"line {i} of what a rank wrote" for i in range(100))
    node = {"id": "7", "type": "KSampler"}
    return {"time": next(ERROR_TIMES), "rank": 1, "device": "cuda:1", "node": node, "message": message, **changes}


def test_a_small_window(page, panel, tell, look):
    """Everything can be read, and what can be pressed is within reach, in every language."""
    page.set_viewport_size({"width": 1024, "height": 640})
    states = ["computing", "loading", "idle", "gone", "silent", "failed", "ended", "starting"]
    ranks = [{**tell.status["ranks"][0], "rank": i, "device": f"cuda:{i}", "state": name} for i, name in enumerate(states)]
    ranks[5]["culprit"] = True
    parts = {"ranks": 2, "unit": "gpu", "obstacle": "", "times": "2.7", "low": "1.9", "high": "2.9", "count": 3}
    parts |= {"steps": 20, "seconds": "9.4", "alone": "25.5", "cases": ["too_fast", "spread", "instead"]}
    fast = {"measuring": False, "parts": parts, "seconds_per_call_on_one_device": None}
    start = {"since": time.time() - 12, "stage": "importing", "last_took": 9.4}
    file = "an_architecture_14b_high_noise_fp8_scaled_by_someone.safetensors"
    loading = {"model": file, "part": 0.34}
    shown = [
        {"state": "failed", "speed": fast, "last_error": an_error()},
        {
            "state": "computing",
            "speed": {**fast, "parts": {**parts, "cases": ["not_measured"]}},
            "weights": {file: "sharded: 2 × 35 GB"},
        },
        {"state": "starting", "starting": start},
        {"state": "loading", "loading": loading},
        {"state": "off", "ranks": [], "speed": None},
    ]
    for language, theme in LOOKS:
        look(language, theme)
        for status in shown:
            tell(**{"ranks": ranks, **status})
            for button in panel.get_by_role("button").all():
                box = button.bounding_box()
                assert box["y"] + box["height"] <= 640
            if status["state"] == "failed":
                assert panel.locator(".pi-stopwatch").is_visible()  # the figure asks for another measurement
            if status["state"] == "computing":
                open_details(panel)
            assert panel.evaluate(TIGHT) == []
            if language != "en":
                texts = panel.locator(TRANSLATED).evaluate_all("elements => elements.map(element => element.innerText)")
                assert [text for text in texts if text and not re.search("[\u3040-\u9fff]", text)] == []


def test_an_error_that_is_dismissed(page, panel, tell):
    """Until there is another, also after the panel was closed."""
    error, card = an_error(), panel.locator(".cp-error")
    tell(last_error=error)
    text = card.locator("pre")
    assert text.evaluate("element => element.scrollHeight > element.clientHeight")
    card.get_by_role("button", name="Dismiss").click()
    expect(card).to_be_hidden()
    tell(last_error=error)
    expect(card).to_be_hidden()
    page.locator(".context-parallel-tab-button").click()
    expect(panel).to_be_hidden()
    page.locator(".context-parallel-tab-button").click()
    expect(panel).to_be_visible()
    expect(card).to_be_hidden()
    tell(last_error=an_error(message="\n".join("all of this is seen" for _ in range(12))))
    expect(card).to_be_visible()
    assert text.evaluate("element => element.scrollHeight == element.clientHeight")


def test_one_visible_gpu_is_said_instead_of_a_start_that_never_comes(page, panel, tell):
    tell(state="off", ranks=[], alone={"case": "hidden", "variable": "CUDA_VISIBLE_DEVICES", "value": "2"})
    activity = panel.locator(".cp-activity").last
    expect(activity).to_have_text(re.compile(r"^1 GPU visible, nothing to share\. CUDA_VISIBLE_DEVICES is 2: "))
    tell(state="off", ranks=[], alone=None)
    expect(activity).to_have_text("All GPUs compute each picture or video together.")
    page.evaluate("prompt => app.loadApiJson(prompt, 'test')", flux_prompt(cp={}))
    page.evaluate("() => app.loadGraphData(app.graph.serialize())")
    expect(activity).to_have_text(re.compile("^Workers start with the next prompt"))


def test_nothing_is_kept_from_who_does_not_see_it_or_has_no_mouse(page, panel, tell):
    """By the rules of axe-core; what changes is announced, and Tab reaches whatever can be pressed, opened or scrolled."""
    memory = {"flux.safetensors": {"case": "sharded", "held": "6", "whole": "12", "unit": "gpu"}}
    tell(state="failed", last_error=an_error(), errors=[an_error(), an_error()], memory=memory)
    expect(panel).to_contain_text("flux.safetensors: each GPU holds 6 of 12 GB")
    panel.locator(".cp-details > summary").click()
    panel.locator(".cp-past > summary").click()
    expect(panel.locator(".cp-past strong")).to_have_count(2)
    found = Axe().run(page, context=".cp-panel").response["violations"]
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []
    for focused, hint in (
        (panel.get_by_role("button", name="Measure"), "Press it once, then run"),
        (panel.get_by_role("button", name="Restart workers"), "Press it when workers hang"),
        (panel.get_by_role("switch", name="Measure runs by themselves"), "Switch it off if no run may take longer"),
        (panel.locator(".cp-devices > summary"), "Switch off a device that other programs need"),
    ):
        expect(focused).to_have_accessible_description(re.compile(f"^{hint}"))
    expect(panel.get_by_role("alert")).to_contain_text("line 0 of what a rank wrote")
    assert panel.locator("[aria-live='polite']").evaluate_all("all => all.map(each => each.className.split(' ')[0])") == [
        "cp-speed",
        "cp-headline",
    ]
    wanted = panel.locator("button, summary, input, pre").evaluate_all(
        "all => all.filter(e => e.checkVisibility() && !e.disabled).length"
    )
    panel.locator("button").first.focus()
    reached = set()
    for _ in range(wanted):
        reached.add(page.evaluate("[...document.querySelectorAll('.cp-panel *')].indexOf(document.activeElement)"))
        page.keyboard.press("Tab")
    assert len(reached - {-1}) == wanted
    tell(last_error=None, errors=[an_error()])
    expect(panel.get_by_role("alert")).to_have_count(0)
    expect(panel.locator(".cp-past strong")).to_have_count(1)
