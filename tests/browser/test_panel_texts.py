"""What the status panel shows of a status that it is told."""

import itertools
import re
import time

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser.conftest import CP, KEEP
from playwright.sync_api import expect
from support.graphs import flux_prompt

from cp_runtime.controller.journal import public_message
from cp_runtime.errors import ContextParallelError

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


ERROR_TIMES = itertools.count(10**9)  # each is another error


def an_error(**changes):
    """What a status says about the last one."""
    message = "\n".join(f"line {i} of what a rank wrote" for i in range(100))
    node = {"id": "7", "type": "KSampler"}
    return {"time": next(ERROR_TIMES), "rank": 1, "device": "cuda:1", "node": node, "message": message, **changes}


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


def test_whoever_queued_the_prompt_sees_the_folders_that_the_status_leaves_out(page, panel, tell):
    """The status is for everyone who reaches the port. A command that copies a model works with its folders only."""
    whole = "pc2 has no model file a.sft. Copy it there: scp '/my models/flux/a.sft' pc2:/models/a.sft.new"
    public = public_message(ContextParallelError(f"{whole}\n\nrank 1 wrote: nothing"))
    assert "/" not in public
    text = panel.locator(".cp-error pre")
    tell(last_error=an_error(message=public))
    expect(text).to_have_text(public)
    failed = {"prompt_id": "1", "node_id": "7", "node_type": "KSampler", "executed": [], "exception_type": "MirrorError"}
    failed |= {"traceback": [], "current_inputs": {}, "current_outputs": []}
    page.evaluate(
        "detail => app.api.dispatchCustomEvent('execution_error', detail)",
        {**failed, "exception_message": f"{whole}\n\nrank 1 wrote: nothing\n"},
    )
    expect(text).to_have_text(whole)
    tell(last_error=an_error(message="another error"))
    expect(text).to_have_text("another error")
    page.keyboard.press("Escape")


def test_one_visible_gpu_is_said_instead_of_a_start_that_never_comes(page, panel, tell):
    tell(state="off", ranks=[], alone={"case": "hidden", "variable": "CUDA_VISIBLE_DEVICES", "value": "2"})
    activity = panel.locator(".cp-activity").last
    expect(activity).to_have_text(re.compile(r"^1 GPU visible, nothing to share\. CUDA_VISIBLE_DEVICES is 2: "))
    tell(state="off", ranks=[], alone=None)
    expect(activity).to_have_text("Press the button, then Run: all GPUs compute each picture or video together.")
    page.evaluate("prompt => app.loadApiJson(prompt, 'test')", flux_prompt(cp={}))
    page.evaluate("() => app.loadGraphData(app.graph.serialize())")
    expect(activity).to_have_text(re.compile("^Ready: press Run"))


def test_nothing_is_kept_from_who_does_not_see_it_or_has_no_mouse(page, panel, tell):
    """By the rules of axe-core; what changes is announced, and Tab reaches whatever can be pressed, opened or scrolled."""
    memory = {"flux.safetensors": {"case": "sharded", "held": "6", "whole": "12", "unit": "gpu"}}
    tell(state="failed", last_error=an_error(), errors=[an_error(), an_error()], memory=memory, hosts=HOSTS)
    expect(panel).to_contain_text("flux.safetensors: each GPU holds 6 of 12 GB")
    for section in ("details", "past", "hosts"):
        panel.locator(f".cp-{section} > summary").click()
    expect(panel.locator(".cp-past strong")).to_have_count(2)
    found = Axe().run(page, context=".cp-panel").response["violations"]
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []
    for focused, hint in (
        (panel.get_by_role("button", name="Measure"), "Press it once, then run"),
        (panel.get_by_role("button", name="Restart workers"), "Press it when workers hang"),
        (panel.get_by_role("switch", name="Measure automatically"), "Switch it off if no run may take longer"),
        (panel.locator(".cp-devices > summary"), "Switch off a device that other programs need"),
    ):
        expect(focused).to_have_accessible_description(re.compile(f"^{hint}"))
    expect(panel.get_by_role("alert")).to_contain_text("line 0 of what a rank wrote")
    # One region is read aloud, once for a state that lasts; figures are not.
    live = panel.get_by_role("status")
    expect(live).to_have_text("failed")
    assert panel.locator("[aria-live]").count() == 0
    wanted = panel.locator("button, summary, input, pre, [tabindex='0']").evaluate_all(
        "all => all.filter(e => e.checkVisibility() && !e.disabled).length"
    )
    panel.locator("[tabindex='0']").first.focus()
    reached = set()
    for _ in range(wanted):
        reached.add(page.evaluate("[...document.querySelectorAll('.cp-panel *')].indexOf(document.activeElement)"))
        page.keyboard.press("Tab")
    assert len(reached - {-1}) == wanted
    # A hint is shown to keys and fingers; what is made anew keeps the focus.
    fact = panel.locator("[data-hint]").filter(has_text="Models")
    fact.first.focus()
    assert fact.first.evaluate("e => getComputedStyle(e, '::after').content.length") > 50
    tell(last_error=None, errors=[an_error()])
    expect(fact.first).to_be_focused()
    expect(panel.get_by_role("alert")).to_have_count(0)
    expect(panel.locator(".cp-past strong")).to_have_count(1)


def spent(part, seconds, on_all=0.0):
    return {"part": part, "seconds": seconds, "on_all": on_all}


PROMPT = {
    "id": "1",
    "seconds": 52.0,
    "parts": [
        spent("text", 2.0), spent("loading", 5.0), spent("denoising", 36.0, 36.0), spent("controlnet", 2.0),
        spent("vae", 4.0, 3.0), spent("upscaling", 2.9), spent("other", 0.1),
    ],
    "cached": 3,
    "sentence": {
        "cases": ["denoising", "alone", "cached"], "denoising": "36", "seconds": "52", "there": "120", "unit": "gpu", "cached": "3",
    },
}  # fmt: skip
"""`last_prompt` of a status."""


def test_where_the_time_of_a_prompt_went(page, panel, tell, picture, theme):
    """Lengths are seconds; what all devices computed has another colour than the rest, and is named; a short part is left out."""
    tell(last_prompt=PROMPT)
    bar = panel.locator(".cp-bar")
    expect(bar).to_be_visible()
    found = bar.locator("span").evaluate_all("all => all.map(e => [e.className.split(' ')[1].slice(8), e.offsetWidth])")
    assert [name for name, _ in found] == ["text", "loading", "denoising", "controlnet", "vae", "vae", "upscaling"]
    widths = [width for _, width in found]
    assert sum(widths) + 2 * (len(widths) - 1) == pytest.approx(bar.evaluate("e => e.clientWidth"), abs=len(widths))
    shares = [width / sum(widths) for width in widths]
    assert shares == pytest.approx([seconds / 51.9 for seconds in (2.0, 5.0, 36.0, 2.0, 3.0, 1.0, 2.9)], abs=0.02)
    hue = "e => { const [r, g, b] = getComputedStyle(e).backgroundColor.match(/[\\d.]+/g); return g > 1.5 * b; }"
    assert bar.locator("span").evaluate_all(f"all => all.map({hue})") == [False, False, True, False, True, False, False]
    legend = panel.locator(".cp-legend")
    expect(legend).to_contain_text("Denoising: 36.0 s")
    expect(legend).to_contain_text("VAE: 4.00 s, 3.00 s of them on all devices")
    said = panel.locator(".cp-prompt .cp-activity")
    expect(said).to_have_text("Denoising took 36 of 52 s. On one GPU all of it would take about 120 s. Nodes from the cache: 3.")
    expect(bar).to_have_accessible_name(re.compile("^Text: 2.00 s, Loading: 5.00 s, Denoising: 36.0 s, "))
    picture(f"shots/prompt-{theme}.png", settle=300)
    nothing = {**PROMPT, "parts": [spent("other", 0.01)], "sentence": {"cases": ["all_cached"], "cached": "7", "seconds": "0.01"}}
    tell(last_prompt=nothing)
    expect(said).to_have_text("Nothing ran. Nodes from the cache: 7.")
    expect(bar).to_be_hidden()
    tell(last_prompt=None)
    expect(said).to_be_hidden()


STATES = {
    "off": {"state": "off", "ranks": [], "speed": None, "memory": {}},
    "starting": {"state": "starting", "starting": {"since": time.time(), "stage": "importing", "last_took": 9.0}, "speed": None},
    "loading": {"state": "loading", "loading": {"model": "a_model_with_a_rather_long_name_fp8_scaled.safetensors", "part": 0.4}},
    "computing": {"state": "computing"},
    "idle": {"state": "idle", "last_prompt": PROMPT},
    "failed": {"state": "failed", "last_error": an_error(), "errors": [an_error()]},
}


def test_an_error_is_in_the_language_of_the_page(page, panel, tell):
    node = {"id": "7", "type": "CPVAEDecode"}  # of a graph that is not open
    error = an_error(message="It failed.", translations={"zh": "失败", "ja": "失敗"}, node=node, time=10**9)
    for language, said, title in (
        ("zh-TW", "失败", r"错误：[上下]午\d+:46:40 · GPU 1 · .+（节点 7）"),
        ("ja", "失敗", r"エラー：\d+:46:40 · GPU 1 · .+（ノード 7）"),
        ("en", "It failed.", r"Error: \d+:46:40 [AP]M · GPU 1 · .+ \(node 7\)"),
    ):
        page.evaluate("language => app.extensionManager.setting.set('Comfy.Locale', language)", language)
        tell(last_error=error, errors=[error])
        expect(panel.locator(".cp-error pre")).to_have_text(said)
        expect(panel.locator(".cp-error strong")).to_have_text(re.compile(title))
        assert panel.locator(".cp-past pre").text_content() == said


HOSTS = [
    {"host": "pc2", "state": "ready", "reason": "", "devices": [{"name": "pc2/cuda:0", "title": "RTX 4090", "memory": 24 << 30}]},
    {"host": "a-host.with-a-rather-long-name.example", "state": "differs", "reason": "torch: 2.8 here, 2.9 there.", "devices": []},
]
NARROW = {"width": 480, "height": 800}


@pytest.mark.parametrize("language", ["en", "zh", "ja"] if KEEP else ["en"])
def test_every_state_fits_a_narrow_window(page, panel, tell, picture, theme, language):
    """No line is cut, none reaches beyond the panel, and the page itself does not scroll to the side."""
    page.evaluate("language => app.extensionManager.setting.set('Comfy.Locale', language)", language)
    page.set_viewport_size(NARROW)
    page.wait_for_timeout(3000 if KEEP else 0)  # ComfyUI loads its own texts
    details = panel.locator(".cp-details > summary")
    details.click()
    panel.locator(".cp-hosts > summary").click()
    for state, changes in STATES.items():
        tell(**changes, hosts=HOSTS)
        beyond = panel.evaluate("""panel => [...panel.querySelectorAll('*')].filter(element => element.checkVisibility()
            && element.getBoundingClientRect().right > panel.getBoundingClientRect().right + 1
            && !element.closest('pre')).map(element => element.className + ': ' + element.textContent)""")
        assert beyond == [], state
        picture(f"shots/{state}-{language}-{theme}.png", settle=300)
    page.evaluate("app.extensionManager.setting.set('Comfy.Locale', 'en')")
