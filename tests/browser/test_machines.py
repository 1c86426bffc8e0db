"""Another computer from the panel: a command for it, how it is, and its removal. `tests/server/test_machines.py` has the rest."""

from __future__ import annotations

import shutil

from playwright.sync_api import expect
from support.joined import joined
from support.server import free_port

MACHINES = "/context_parallel/machines"


def test_a_computer_is_added_and_removed(browser_server, page, panel, tmp_path, checkpoints_dir):
    panel.get_by_text("Other computers").click()
    panel.get_by_role("button", name="Add a computer").click()
    address = page.get_by_role("dialog").get_by_role("textbox")
    expect(address).not_to_have_value("")  # it knows its own
    address.fill(f"127.0.0.2:{free_port()}")
    address.press("Enter")
    command = panel.locator(".cp-past pre").first
    expect(command).to_contain_text("join.py 127.0.0.2:")
    base = tmp_path / "base"
    (base / "custom_nodes").mkdir(parents=True)
    shutil.copytree(checkpoints_dir / "diffusion_models", base / "models" / "diffusion_models")
    code, options = command.inner_text().split()[-1], ("--base-directory", str(base))
    with joined(code, tmp_path / "log", options=options, cwd=browser_server.comfyui_path):
        other = panel.locator("[data-machine=pc2]")
        expect(other).to_contain_text("ready: the next prompt uses it")
        expect(other).to_contain_text("pc2/cpu")
        other.get_by_role("button", name="Remove").click()
        expect(other).to_have_count(0)
    expect(command).not_to_be_visible()
    assert browser_server.get(MACHINES)["listens"] is False
