"""A run as a person sees it: Queue, progress, the status panel, Measure, Cancel, a rank that dies, Restart."""

import os
import re
import signal

import pytest
from browser.conftest import CP, KEEP, PIXELS
from playwright.sync_api import expect
from support.faults import SLACK
from support.graphs import flux_prompt

PATIENCE = 20_000 * SLACK  # milliseconds
LONG = {"width": PIXELS, "height": PIXELS, "steps": 30 if KEEP else 12}
SHORT = {**LONG, "steps": LONG["steps"] // 2}
WATCH = """() => {
    const panel = document.querySelector('.cp-panel');
    const states = () => [...panel.querySelectorAll('.cp-headline, .cp-state')].map(element => element.textContent);
    window.cpSeen = [];
    new MutationObserver(() => window.cpSeen.push(states())).observe(panel, { childList: true, subtree: true });
}"""
"""Notes the headline and the state of every rank, in `window.cpSeen`, whenever the panel changes."""
CENTRE = "app.canvas.ds.scale = 1; app.canvas.centerOnNode(app.graph.nodes.find(node => node.type === 'KSampler'))"
SETTINGS = "/context_parallel/settings"


@pytest.fixture(scope="module", autouse=True)
def measured_when_asked(browser_server):
    """With pictures there are enough runs here for one to be measured by itself."""
    browser_server.post(SETTINGS, {"measure": False})
    yield
    browser_server.post(SETTINGS, {"measure": True})


NOT_MEASURED = "not compared with one process yet"
"""What is said of a run before its kind is measured on one device."""


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


def test_quiet_without_workers(browser_server, panel):
    if browser_server.worker_pids():
        pytest.skip("runs first, on a server that has started no workers")
    headline(panel, "no workers")
    expect(panel).to_contain_text("Press the button, then Run: all GPUs compute each picture or video together.")
    expect(panel.locator(".cp-speed")).to_have_text("No run yet")
    expect(panel.locator(".cp-about")).to_have_text("The speed-up appears after one to three runs, or after one with Measure.")
    expect(panel.get_by_role("button")).to_have_text(["Measure", "Use all GPUs in this workflow"])


def test_a_run(browser_server, page, panel, picture, theme):
    restart_pool(browser_server)
    load(page, **LONG)
    page.evaluate(CENTRE)
    page.evaluate(WATCH)
    press_queue(page)
    headline(panel, "starting")
    expect(panel.locator(".cp-activity").last).to_have_text(re.compile(r"^starting 2 workers, \d+ s, \w+"))
    expect(page.get_by_text(re.compile("^starting 2 workers: "))).to_have_count(1)  # in the node that waits
    picture(f"shots/panel-starting-{theme}.png")

    headline(panel, "computing")
    pids = browser_server.worker_pids()
    assert len(pids) == 2
    expect(panel.locator(".cp-speed")).to_have_text("Not compared yet")
    expect(panel.locator(".cp-about")).to_have_text(NOT_MEASURED)
    expect(panel.locator(".cp-activity").last).to_have_text(re.compile(r"^KSampler: [\d.]+ m?s per call$"))
    expect(panel.locator(".cp-details > .cp-lists")).to_be_hidden()
    for rank, pid in enumerate(pids):
        expect(panel.locator(f"[data-rank='{rank}']")).to_have_text(f"Process {rank}computing")
        card = panel.locator(f"[data-details-of='{rank}']")
        expect(card).to_contain_text(re.compile(r"Memory\s*host \d+\.\d\d GiB"))
        expect(card).to_contain_text(re.compile(r"Tokens.*\d+ img"))
        expect(card).to_contain_text(str(pid))
    expect(panel).to_contain_text(re.compile(r"Workers\s*2 ranks, gloo"))
    expect(panel).to_contain_text("ulysses 2")
    expect(panel).to_contain_text(re.compile(r"Denoise call\s*[\d.]+ m?s\s*On one device\s*not measured"))
    expect(panel).to_contain_text(re.compile(r"Waiting\s*\d+ %"))
    expect(page.get_by_text(re.compile(r"^[\d.e-]+ s per call · 2 ranks \(ulysses 2\)"))).to_have_count(1)
    expect(page.locator("body")).to_contain_text(re.compile(r"Current node:\s*KSampler\s*[1-9]\d*%"))

    headline(panel, "idle")
    assert browser_server.worker_pids() == pids
    expect(panel.locator("[data-rank='0'] .cp-state")).to_have_text("idle")
    picture(f"shots/panel-idle-{theme}.png")
    seen = [(head, *ranks) for head, *ranks in page.evaluate("window.cpSeen") if head in ("loading", "computing", "idle")]
    assert {head for head, *_ in seen} >= {"computing", "idle"}
    assert [states for states in seen if states[0] not in states[1:]] == []


def test_measure(browser_server, page, panel):
    """The next run says how many times as fast it is; so do the status and the node, and later runs."""
    load(page, **SHORT)
    press_queue(page)
    speed, about, button = panel.locator(".cp-speed"), panel.locator(".cp-about"), panel.get_by_role("button", name="Measure")
    headline(panel, "computing")
    headline(panel, "idle")
    expect(about).to_have_text(re.compile(rf"^{SHORT['steps']} steps in \S+ s: {NOT_MEASURED}$"))
    for cancelled in (True, False):
        button.click()
        expect(speed).to_have_text("The next run measures")
        expect(button).to_be_hidden()
        if cancelled:
            panel.get_by_role("button", name="Cancel measuring").click()
            expect(about).to_contain_text(NOT_MEASURED)
    # Of a figure that cannot be, where others use the cores, it says only that.
    times = re.compile(r"\d+\.\d × as fast as one process|the comparison was disturbed")
    for run in (SHORT, LONG):
        load(page, **run)
        page.evaluate(CENTRE)
        press_queue(page)
        headline(panel, "computing")
        if run is LONG:  # it was measured before
            expect(speed).to_have_text("Running")
        headline(panel, "idle")
        expect(about).to_have_text(times)
        assert speed.evaluate("element => element.clientHeight / parseFloat(getComputedStyle(element).lineHeight)") < 1.5  # a line
        now = browser_server.get("/context_parallel/status")["speed"]
        expect(about).to_have_text(now["words"])
        if now["times"] is not None:
            assert now["times"] == min(2, now["seconds_per_call_on_one_device"] / now["seconds_per_call"])
        figure = re.search(r"about \d+\.\d × as fast as one process|$", now["words"])[0]
        expect(page.get_by_text(re.compile(rf"^{figure}( · )?[\d.e-]+ s per call"))).to_have_count(1)
        assert now["words"].startswith(f"{run['steps']} steps in ")
        expect(button).to_have_text("Measure again")


def test_cancel(browser_server, page, panel):
    load(page, width=512, height=512, steps=2000)
    press_queue(page)
    headline(panel, "computing")
    pids = browser_server.worker_pids()
    page.get_by_role("button", name="Cancel current run").first.click()
    headline(panel, "idle")
    expect_text_in_node(page, "cancelled")
    expect(panel.locator(".cp-speed")).to_have_text("Cancelled")
    assert browser_server.worker_pids() == pids
    assert browser_server.get("/queue")["queue_running"] == []


def test_a_rank_that_is_killed(browser_server, page, panel, picture, theme):
    load(page, width=512, height=512, steps=2000)
    press_queue(page)
    headline(panel, "computing")
    expect(page.get_by_text(re.compile(r"2 ranks \("))).to_have_count(1)
    pids = browser_server.worker_pids()
    os.kill(pids[1], signal.SIGKILL)
    headline(panel, "failed")
    expect(panel.locator(".cp-speed")).to_have_text("The last run failed")
    expect(panel.locator(".cp-about")).to_be_hidden()
    error = panel.locator(".cp-error")
    expect(error).to_contain_text(re.compile(r"Error: \d+:\d\d:\d\d.* · Process 1 · KSampler \(node sampler\)"))
    expect(error).to_contain_text(f"rank 1 (pid {pids[1]}) failed: SIGKILL")
    expect(panel.locator(".cp-culprit")).to_have_text("Process 1failed")
    expect(panel.locator("[data-rank='0']")).to_have_text("Process 0ended")
    expect(panel.locator("[data-rank='0']")).to_have_attribute("title", re.compile("ended because Process 1 failed"))
    # ComfyUI shows the error of the prompt in its own way, too.
    expect(page.get_by_text("failed: SIGKILL").filter(visible=True).last).to_be_visible()
    expect_text_in_node(page, "failed")
    picture(f"shots/panel-failed-{theme}.png")

    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    error.get_by_role("button", name="Copy").click()
    expect(error.get_by_role("button").first).to_have_text("Copied")
    assert f"rank 1 (pid {pids[1]}) failed: SIGKILL" in page.evaluate("navigator.clipboard.readText()")

    panel.get_by_role("button", name="Restart workers").click()
    headline(panel, "idle")
    started = browser_server.worker_pids()
    assert len(started) == 2
    assert not set(started) & set(pids)
    expect(panel.locator("[data-details-of='1']")).to_contain_text(str(started[1]))
    expect(error).to_be_hidden()
    expect(panel.locator(".cp-past")).to_contain_text("failed: SIGKILL")  # it is kept where it disturbs nobody
    expect(panel.locator(".cp-culprit")).to_have_count(0)


def test_restart_asks_while_a_prompt_runs(browser_server, page, panel):
    load(page, width=512, height=512, steps=2000)
    press_queue(page)
    headline(panel, "computing")
    pids = browser_server.worker_pids()
    panel.get_by_role("button", name="Restart workers").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("its prompt fails. Between two calls it continues with the new workers")
    dialog.get_by_role("button", name="Cancel").click()
    assert browser_server.worker_pids() == pids
    panel.get_by_role("button", name="Restart workers").click()
    dialog.get_by_role("button", name="Confirm").click()
    expect(panel.locator("[data-details-of='0']")).not_to_contain_text(str(pids[0]), timeout=PATIENCE)
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
