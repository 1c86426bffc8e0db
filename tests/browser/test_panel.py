"""A run as a person sees it: Queue, progress, the status panel, Cancel, a rank that dies, Restart."""

from __future__ import annotations

import os
import re
import signal

import pytest
from playwright.sync_api import expect
from support.faults import SLACK
from support.graphs import flux_prompt

PATIENCE = 20_000 * SLACK  # milliseconds
CP = {"world_size": 2, "ulysses_degree": 2}
LONG = {"width": 512, "height": 512, "steps": 60}


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


def test_cancel(browser_server, page, panel):
    load(page, width=512, height=512, steps=2000)
    press_queue(page)
    headline(panel, "computing")
    pids = browser_server.worker_pids()
    page.get_by_role("button", name="Cancel current run").first.click()
    headline(panel, "idle")
    assert browser_server.worker_pids() == pids
    assert browser_server.get("/queue")["queue_running"] == []


def test_a_rank_that_is_killed(browser_server, page, panel, picture, theme):
    load(page, width=512, height=512, steps=2000)
    press_queue(page)
    headline(panel, "computing")
    pids = browser_server.worker_pids()
    os.kill(pids[1], signal.SIGKILL)
    headline(panel, "failed")
    error = panel.locator(".cp-error")
    expect(error).to_contain_text("Last error, rank 1")
    expect(error).to_contain_text(f"rank 1 (pid {pids[1]}) failed: SIGKILL")
    expect(panel.locator("[data-rank='1'] .cp-state")).to_have_text("gone")
    # ComfyUI shows the error of the prompt in its own way, too.
    expect(page.get_by_text("failed: SIGKILL").last).to_be_visible()
    picture(f"docs/images/panel-failed-{theme}.png")

    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    error.get_by_role("button", name="Copy").click()
    expect(error.get_by_role("button")).to_have_text("Copied")
    assert f"rank 1 (pid {pids[1]}) failed: SIGKILL" in page.evaluate("navigator.clipboard.readText()")

    panel.get_by_role("button", name="Restart workers").click()
    headline(panel, "idle")
    started = browser_server.worker_pids()
    assert len(started) == 2
    assert not set(started) & set(pids)
    expect(panel.locator("[data-rank='1']")).to_contain_text(str(started[1]))

    load(page)
    press_queue(page)
    headline(panel, "computing")
    headline(panel, "idle")
    assert browser_server.worker_pids() == started


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
