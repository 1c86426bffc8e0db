"""Other computers in the panel: a command for a new one, how each is, its removal. One joins in `tests/server/test_machines.py`."""

from playwright.sync_api import expect
from support.server import PACK, free_port

MACHINES = "/context_parallel/machines"
FOUND = {
    "listens": True,
    "address": "192.168.1.5",
    "machines": [
        {"name": "pc2", "state": "ready", "why": [], "devices": ["cuda:0", "cuda:1"]},
        {"name": "pc3", "state": "refused", "why": ["torch: 2.9.0 there, 2.11.0 here. Install the same."]},
    ],
}


def test_a_computer_is_added_and_removed(browser_server, page, panel):
    panel.get_by_text("Other computers").click()
    panel.get_by_role("button", name="Add a computer").click()
    expect(page.get_by_role("dialog")).to_contain_text("neither encrypted nor signed")
    address = page.get_by_role("dialog").get_by_role("textbox")
    expect(address).to_have_value(f"{browser_server.get(MACHINES)['address']}:8289")
    address.fill(f"127.0.0.2:{free_port()}")
    address.press("Enter")
    command = panel.locator(".cp-machines pre")
    expect(command).to_contain_text(f"python custom_nodes/{PACK}/cp_runtime/machines/join.py 127.0.0.2:")
    assert browser_server.get(MACHINES)["listens"]

    found = dict(FOUND)

    def two(route):
        if route.request.method == "GET":
            route.fulfill(json=found)
        else:
            found["machines"] = FOUND["machines"][1:]
            route.fulfill(json={"code": None})

    page.route(f"**{MACHINES}", two)
    machines = panel.locator("[data-machine]")
    expect(machines.first).to_contain_text("ready: the next prompt uses it")
    expect(machines.first).to_contain_text("pc2/cuda:0, pc2/cuda:1")
    expect(machines.last).to_contain_text("torch: 2.9.0 there")
    last = machines.last.get_by_role("button", name="Remove")
    last.focus()
    with page.expect_request(lambda request: request.post_data == '{"remove":"pc2"}'):
        machines.first.get_by_role("button", name="Remove").click()
    expect(machines).to_have_count(1)
    last.focus()
    page.wait_for_timeout(2500)  # the list is asked for again
    expect(last).to_be_focused()
    expect(command).to_contain_text("join.py 127.0.0.2:")  # others may use it
    page.unroute(f"**{MACHINES}")
    expect(machines).to_have_count(0)

    panel.get_by_role("button", name="Stop waiting").click()
    expect(command).not_to_be_visible()
    assert browser_server.get(MACHINES)["listens"] is False
    panel.get_by_text("Other computers").click()
