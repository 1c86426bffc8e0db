"""A run as a person sees it: Queue, progress, the status panel, Cancel, a rank that dies, Restart."""

from __future__ import annotations

import os
import re
import signal

import pytest
from browser.conftest import THEMES
from playwright.sync_api import expect
from support.faults import SLACK
from support.graphs import flux_prompt

PATIENCE = 20_000 * SLACK  # milliseconds
CP = {"world_size": 2, "ulysses_degree": 2}
LONG = {"width": 512, "height": 512, "steps": 30}
WATCH = """() => {
    const panel = document.querySelector('.cp-panel');
    const states = () => [...panel.querySelectorAll('.cp-headline, .cp-state')].map(element => element.textContent);
    window.cpSeen = [];
    new MutationObserver(() => window.cpSeen.push(states())).observe(panel, { childList: true, subtree: true });
}"""
"""Notes the headline and the state of every rank, in `window.cpSeen`, whenever the panel changes."""
CONTRAST = """elements => elements.map(element => {
    const parse = colour => colour.match(/[\\d.]+/g).map(Number);
    const luminance = colour => {
        const [r, g, b] = colour.map(c => c / 255).map(c => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    let behind = element;
    while (parse(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
    const colours = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(parse);
    const [dark, light] = colours.map(luminance).sort((a, b) => a - b);
    return [element.className || element.tagName, (light + 0.05) / (dark + 0.05)];
})"""
"""Contrast of each element's text to what is behind it, as WCAG defines it."""


@pytest.fixture
def panel(page):
    """The opened status panel."""
    page.locator(".context-parallel-tab-button").click()
    shown = page.get_by_test_id("context-parallel-panel")
    expect(shown).to_be_visible()
    return shown


def headline(panel, text):
    expect(panel.locator(".cp-headline")).to_have_text(text, timeout=PATIENCE)


def restart_pool(server):
    """End the workers, so that the next prompt starts them. One that finds them dead says so and fails."""
    pids = server.worker_pids()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    if pids:
        assert server.run(flux_prompt(cp=CP)).status == "error"


def load(page, **changes):
    page.evaluate("prompt => app.loadApiJson(prompt, 'test')", flux_prompt(cp=CP, **changes))
    page.wait_for_timeout(500)


def press_queue(page):
    page.get_by_test_id("queue-button").first.click()


def expect_text_in_node(page, text):
    """What stands under the sampler."""
    page.wait_for_function(
        """text => app.graph.nodes.find(node => node.type === 'KSampler')
            .widgets.find(widget => widget.name === '$$node-text-preview')?.value === text""",
        arg=text,
    )


@pytest.fixture
def tell(browser_server, tab, page, panel):
    """Gives the panel the server's status with changes, as an event of the server does; those do not reach it any more.

    A panel knows what it was told, and what was dismissed: the page is loaded before (by `page`) and after.
    """
    browser_server.run(flux_prompt(cp=CP)).check()
    page.evaluate(
        """() => {
            const send = EventTarget.prototype.dispatchEvent;
            EventTarget.prototype.dispatchEvent = function (event) {
                return (event.type === 'context_parallel.status' && !event.detail.told) || send.call(this, event);
            };
        }"""
    )
    status = {**browser_server.get("/context_parallel/status"), "told": True}

    def send(**changes):
        page.evaluate("status => app.api.dispatchCustomEvent('context_parallel.status', status)", {**status, **changes})

    send.rank = status["ranks"][0]
    yield send
    tab.spoil()


def a_call(**changes):
    """What a status says about the last call."""
    call = {"degrees": {"ulysses": 2}, "seconds": 1.83, "seconds_per_call": None, "seconds_per_call_on_one_device": None}
    return {**call, "communication_share": 0.1, **changes}


def test_quiet_without_workers(browser_server, panel):
    if browser_server.worker_pids():
        pytest.skip("runs first, on a server that has started no workers")
    headline(panel, "no workers")
    expect(panel).to_contain_text("Workers start with the next prompt")
    expect(panel.get_by_role("button")).to_have_count(0)


def test_a_run(browser_server, page, panel, picture, theme):
    restart_pool(browser_server)
    load(page, **LONG)
    page.evaluate("app.canvas.ds.scale = 1; app.canvas.centerOnNode(app.graph.nodes.find(node => node.type === 'KSampler'))")
    page.evaluate(WATCH)
    press_queue(page)
    headline(panel, "starting")
    expect(panel.locator(".cp-activity")).to_have_text("starting 2 ranks…")
    expect(page.get_by_text("starting 2 ranks…")).to_have_count(2)  # the panel, and the node that waits
    picture(f"docs/images/panel-starting-{theme}.png")

    headline(panel, "computing")
    pids = browser_server.worker_pids()
    assert len(pids) == 2
    for rank, pid in enumerate(pids):
        card = panel.locator(f"[data-rank='{rank}']")
        expect(card).to_contain_text(f"Rank {rank}")
        expect(card).to_contain_text("cpu")
        expect(card).to_contain_text(str(pid))
        expect(card).to_contain_text(re.compile(r"Memory\s*host \d+\.\d\d GiB"))
        expect(card).to_contain_text(re.compile(r"Tokens.*\d+ img"))
    expect(panel).to_contain_text(re.compile(r"Workers\s*2 ranks, gloo"))
    expect(panel).to_contain_text("ulysses 2")
    expect(panel).to_contain_text(re.compile(r"Denoise call\s*[\d.]+ m?s"))
    expect(panel).to_contain_text("not measured")
    expect(panel).to_contain_text(re.compile(r"Communication\s*\d+ %"))
    expect(page.get_by_text(re.compile(r"^2 ranks \(ulysses 2\), [\d.e-]+ s per call"))).to_have_count(2)
    expect(page.locator("body")).to_contain_text(re.compile(r"Current node:\s*KSampler\s*[1-9]\d*%"))
    picture(f"docs/images/panel-computing-{theme}.png")

    headline(panel, "idle")
    assert browser_server.worker_pids() == pids
    expect(panel.locator("[data-rank='0'] .cp-state")).to_have_text("idle")
    picture(f"docs/images/panel-idle-{theme}.png")
    seen = [(head, *ranks) for head, *ranks in page.evaluate("window.cpSeen") if head in ("loading", "computing", "idle")]
    assert {head for head, *_ in seen} >= {"computing", "idle"}
    assert [states for states in seen if states[0] not in states[1:]] == []


def test_cancel(browser_server, page, panel):
    load(page, width=512, height=512, steps=2000)
    press_queue(page)
    headline(panel, "computing")
    pids = browser_server.worker_pids()
    page.get_by_role("button", name="Cancel current run").first.click()
    headline(panel, "idle")
    expect_text_in_node(page, "cancelled")
    assert browser_server.worker_pids() == pids
    assert browser_server.get("/queue")["queue_running"] == []


def test_a_rank_that_is_killed(browser_server, page, panel, picture, theme):
    load(page, width=512, height=512, steps=2000)
    press_queue(page)
    headline(panel, "computing")
    expect(page.get_by_text(re.compile(r"^2 ranks \("))).to_have_count(2)
    pids = browser_server.worker_pids()
    os.kill(pids[1], signal.SIGKILL)
    headline(panel, "failed")
    error = panel.locator(".cp-error")
    expect(error).to_contain_text(re.compile(r"Last error, at \d+:\d\d:\d\d.*, rank 1"))
    expect(error).to_contain_text(f"rank 1 (pid {pids[1]}) failed: SIGKILL")
    expect(panel.locator("[data-rank='1'] .cp-state")).to_have_text("gone")
    # ComfyUI shows the error of the prompt in its own way, too.
    expect(page.get_by_text("failed: SIGKILL").last).to_be_visible()
    expect_text_in_node(page, "failed")
    picture(f"docs/images/panel-failed-{theme}.png")

    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    error.get_by_role("button", name="Copy").click()
    expect(error.get_by_role("button").first).to_have_text("Copied")
    assert f"rank 1 (pid {pids[1]}) failed: SIGKILL" in page.evaluate("navigator.clipboard.readText()")

    panel.get_by_role("button", name="Restart workers").click()
    headline(panel, "idle")
    started = browser_server.worker_pids()
    assert len(started) == 2
    assert not set(started) & set(pids)
    expect(panel.locator("[data-rank='1']")).to_contain_text(str(started[1]))

    error.get_by_role("button", name="Dismiss").click()
    load(page, **{**LONG, "steps": 20})
    press_queue(page)
    headline(panel, "computing")
    headline(panel, "idle")
    assert browser_server.worker_pids() == started
    expect(error).to_be_hidden()


@pytest.mark.parametrize("theme", THEMES, indirect=True)
def test_a_long_error_in_a_small_window(page, panel, theme, tell):
    """It can be read, and dismissed until there is another; Restart is within reach, with many ranks as well."""
    page.set_viewport_size({"width": 1280, "height": 720})
    error = {"time": 1e9, "rank": 1, "message": "\n".join(f"line {i} of what a rank wrote" for i in range(100))}
    tell(last_error=error)
    card = panel.locator(".cp-error")
    for name in ("Restart workers", "Copy", "Dismiss"):
        box = panel.get_by_role("button", name=name).bounding_box()
        assert box["y"] + box["height"] <= 720
    text = card.locator("pre")
    assert text.evaluate("element => element.scrollHeight > element.clientHeight")
    again = panel.get_by_role("button", name="Restart workers")
    assert again.bounding_box()["y"] < card.bounding_box()["y"]

    card.get_by_role("button", name="Dismiss").click()
    expect(card).to_be_hidden()
    tell(last_error=error)
    expect(card).to_be_hidden()
    page.locator(".context-parallel-tab-button").click()
    expect(panel).to_be_hidden()
    page.locator(".context-parallel-tab-button").click()
    expect(panel).to_be_visible()
    expect(card).to_be_hidden()
    tell(last_error={**error, "time": 1e9 + 1})
    expect(card).to_be_visible()

    names = ["computing", "loading", "idle", "gone", "silent", "starting", "computing", "idle"]
    ranks = [{**tell.rank, "rank": i, "state": name} for i, name in enumerate(names)]
    for state in ("failed", "computing", "starting"):
        tell(ranks=ranks, last_error=error, state=state)
        texts = panel.locator(".cp-headline, .cp-activity, .cp-state, .cp-name, .cp-value, .cp-error strong, .cp-error pre, button")
        assert [weak for weak in texts.evaluate_all(CONTRAST) if weak[1] < 4.5] == []
        assert again.bounding_box()["y"] < 200


def test_the_factor_is_the_quotient_of_what_is_shown(panel, tell):
    tell(last_call=a_call())
    expect(panel).to_contain_text(re.compile(r"Denoise call\s*1\.83 s\s*On one device\s*not measured"))
    tell(last_call=a_call(seconds_per_call=1.37, seconds_per_call_on_one_device=3.07))
    expect(panel).to_contain_text(re.compile(r"Denoise call\s*1\.37 s\s*On one device\s*3\.07 s \(2\.24 ×\)"))


def test_gpus_that_do_not_reach_each_other_are_mentioned(panel, tell):
    tell(backend="nccl", peer_to_peer=False)
    expect(panel).to_contain_text("2 ranks, nccl, no peer-to-peer")
    tell(backend="nccl", peer_to_peer=True)
    expect(panel).not_to_contain_text("peer-to-peer")


def test_restart_asks_while_a_prompt_runs(browser_server, page, panel):
    load(page, width=512, height=512, steps=2000)
    press_queue(page)
    headline(panel, "computing")
    pids = browser_server.worker_pids()
    panel.get_by_role("button", name="Restart workers").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("A prompt that is running on them fails")
    dialog.get_by_role("button", name="Cancel").click()
    assert browser_server.worker_pids() == pids
    panel.get_by_role("button", name="Restart workers").click()
    dialog.get_by_role("button", name="Confirm").click()
    expect(panel.locator("[data-rank='0']")).not_to_contain_text(str(pids[0]), timeout=PATIENCE)
    browser_server.interrupt()  # the prompt goes on with the new workers if it was between two steps
    headline(panel, "idle")
    assert not set(browser_server.worker_pids()) & set(pids)


def test_a_page_that_opens_later_knows_the_state(browser_server, page, panel):
    """Events come only when something changes."""
    load(page)
    press_queue(page)
    headline(panel, "idle")
    page.reload()
    page.locator(".context-parallel-tab-button").click()
    headline(page.get_by_test_id("context-parallel-panel"), "idle")
