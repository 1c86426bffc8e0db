"""Other computers in the panel: a field, how each is, and what CP Config takes. ssh is a stand-in."""

from browser.conftest import MADE_UP_GPUS
from playwright.sync_api import expect
from support.graphs import flux_prompt

TELL = "status => app.api.dispatchCustomEvent('context_parallel.status', status)"
GPUS = [{"name": f"gpubox/cuda:{number}", "title": "RTX 4090", "memory": 24 << 30} for number in (0, 1)]


def opened(panel):
    """The section; a field in it, and the button beside that."""
    hosts = panel.locator(".cp-hosts")
    hosts.locator("summary").click()
    name = hosts.get_by_role("textbox", name="Name of a computer that ssh reaches")
    return hosts, name, hosts.get_by_role("button", name="Check")


def test_a_computer_is_checked(browser_server, page, panel):
    pids = browser_server.worker_pids()
    hosts, name, check = opened(panel)
    name.press_sequentially("me@gpubox")
    name.press("Enter")
    toast = page.locator(".p-toast-message")
    expect(toast).to_contain_text("Not checked")
    expect(toast).to_contain_text("host: Give the name after Host in your ssh configuration")
    expect(name).to_have_value("me@gpubox")
    name.fill("gpubox")
    check.click()
    ready = hosts.locator("[data-host='gpubox']")
    expect(ready.locator(".cp-state")).to_have_text("ready")
    expect(ready.locator("code")).to_have_text("cpu:0, cpu:1, gpubox/cpu")
    expect(name).to_have_value("")
    name.fill("nowhere")
    name.press("Enter")
    wrong = hosts.locator("[data-host='nowhere']")
    expect(wrong.locator(".cp-state")).to_have_text("not reached")
    expect(wrong.locator("pre")).to_contain_text("No route to host\nSee what this says: ssh -o BatchMode=yes nowhere true")
    expect(wrong.get_by_role("button")).to_have_count(0)  # nothing to copy
    assert browser_server.worker_pids() == pids


@MADE_UP_GPUS
def test_its_gpus_are_named_as_cp_config_takes_them(browser_server, page, panel):
    hosts, _, _ = opened(panel)
    status = browser_server.status()
    host = {"host": "gpubox", "state": "checking", "reason": "", "devices": []}
    line, state = hosts.locator("[data-host]"), hosts.locator("[data-host] .cp-state")
    page.evaluate(TELL, {**status, "hosts": [host]})
    expect(state).to_have_text("checking…")
    for now, words in (("ready", "ready"), ("working", "working with this one")):
        page.evaluate(TELL, {**status, "hosts": [{**host, "state": now, "devices": GPUS}]})
        expect(state).to_have_text(words)
    expect(line).to_contain_text("gpubox/cuda:0 RTX 4090 24 GB\ngpubox/cuda:1 RTX 4090 24 GB", use_inner_text=True)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    copy = line.get_by_role("button")
    copy.click()
    expect(copy).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "cuda:0, cuda:1, cuda:2, gpubox/cuda:0, gpubox/cuda:1"
    config = flux_prompt(cp={"devices": "cuda:2,gpubox/cuda:1,tower/cuda:0"})
    page.evaluate("prompt => app.loadApiJson(prompt, 'test')", config)
    page.evaluate("() => app.api.dispatchCustomEvent('graphChanged', {})")
    expect(line.locator("code")).to_have_text("cuda:2, gpubox/cuda:1, tower/cuda:0, gpubox/cuda:0")  # what is there stays
    page.evaluate(TELL, {**status, "hosts": [{**host, "state": "differs", "reason": "torch: 2.8 here, 2.9 there."}]})
    expect(state).to_have_text("reached, but cannot work yet")
    expect(line).to_contain_text("torch: 2.8 here, 2.9 there.")
    expect(copy).to_be_hidden()
    page.evaluate(TELL, browser_server.status())
