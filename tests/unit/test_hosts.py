"""How ranks on other computers are started, and what is said where that fails; without ssh, which `make machines` has."""

import os
import re
import time

import psutil
import pytest
from support.ssh import put_ssh

from cp_runtime.errors import ConfigError, PoolError
from cp_runtime.pool import hosts
from cp_runtime.pool.config import DeviceInventory, RuntimeConfig, WorkerSite
from cp_runtime.pool.facts import facts_of
from cp_runtime.pool.frames import Frame, Reader, write
from cp_runtime.pool.hosts import command_for, differences, interface_to, place_of
from cp_runtime.pool.processes import PROGRAM
from cp_runtime.pool.remote import MARK, without_paths


def test_paths_are_those_of_here_unless_the_user_says_otherwise(monkeypatch):
    assert place_of("gpubox", "/home/me/ComfyUI")[1:] == ("/home/me/ComfyUI", str(PROGRAM))
    monkeypatch.setenv("CP_HOST_gpu_box_2", "/opt/python:/srv/ComfyUI")
    python, folder, program = place_of("gpu-box.2", "/home/me/ComfyUI")
    assert (python, folder) == ("/opt/python", "/srv/ComfyUI")
    assert program == os.path.join("/srv/ComfyUI", "custom_nodes", *PROGRAM.parts[-4:])


def test_the_command_asks_nobody_and_forwards_the_store_once():
    command = command_for("gpubox", ["/the python", "-u", "/a program"], {"A": "b c"}, 4711)
    assert command[0] == "ssh"
    assert command[command.index("-R") + 1] == "4711:127.0.0.1:4711"
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes"} < {*command}
    assert command[-2:] == ["gpubox", "env 'A=b c' '/the python' -u '/a program'"]
    assert "-R" not in command_for("gpubox", ["python"], {}, 0)


def test_all_differences_are_said_at_once():
    here = facts_of("")
    assert {"this pack", "ComfyUI", "torch"} <= here.keys()
    assert differences("gpubox", "", here) == ""
    said = differences("gpubox", "", {**here, "torch": "1.0", "this pack": "0"})
    assert said.startswith("the computer gpubox cannot work for this ComfyUI yet:")
    torch = f"torch: {here['torch']} here, 1.0 there. Install the same version: pip install torch=="
    assert [words for words in (torch, "this pack: ", "git pull") if words not in said] == []


def test_options_that_name_folders_stay_here():
    options = "main.py --base-directory /a --cpu --extra-model-paths-config a b --input-directory=/c --lowvram"
    assert without_paths(options.split()) == ["main.py", "--cpu", "--lowvram"]


def test_what_a_shell_prints_before_the_first_frame_is_skipped():
    source, target = os.pipe()
    os.write(target, b"Welcome!\n" + MARK[:5] + b"\n" + MARK)
    write(target, Frame(b"hello"))
    os.close(target)
    reader = Reader(source)
    assert reader.skip_to(MARK)
    assert reader.read().header == b"hello"
    assert not reader.skip_to(MARK)
    os.close(source)


def test_a_host_that_no_name_leads_to_comes_with_the_command_to_see_why():
    with pytest.raises(PoolError, match=r"is not reached .*ssh -o BatchMode=yes no\.such\.host\.invalid true"):
        interface_to("no.such.host.invalid")


CPU, CUDA = DeviceInventory(type="cpu", count=0), DeviceInventory(type="cuda", count=1)


@pytest.mark.parametrize(
    ("inventory", "devices", "machines"),
    [
        (CPU, "cpu,gpubox/cpu,gpubox/cpu", ("", "gpubox", "gpubox")),
        (CUDA, "cuda:0, b/cuda:1, a/cuda:0, b/cuda:0", ("", "b", "b", "a")),
    ],
)
def test_devices_of_hosts(inventory, devices, machines):
    assert RuntimeConfig.resolve(inventory=inventory, devices=devices).machines == machines


NO_HOST = ("-oProxyCommand=x/cuda:0", "a b/cuda:0", "a/cpu", "a/b/cuda:0", "/cuda:0")


@pytest.mark.parametrize("device", NO_HOST)
def test_what_is_no_host_is_refused_before_anything_starts(device):
    with pytest.raises(ConfigError, match="by a name that ssh knows"):
        RuntimeConfig.resolve(inventory=CUDA, devices=f"cuda:0,{device}")


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    for name, value in put_ssh(tmp_path).items():
        monkeypatch.setenv(name, value)


LOOKS = {
    "older": (
        "differs",
        r"cannot work for this ComfyUI yet:\n  ComfyUI: not installed here, 0\.0\.1 there\. Update the older one\.",
    ),
    "bare": ("not reached", r"ssh did not start a rank there\. .*/no/python.*\nIf Python .* say so in CP_HOST_bare: see docs/mach"),
    "nowhere": ("not reached", r"It may sleep, or be switched off\. .*\nSee what this says: ssh -o BatchMode=yes nowhere true"),
    "asleep": ("not reached", r"has not named its devices within 2 s\. See what this says: ssh"),
    "gpubox": ("differs", r"the computer gpubox has no xpu device that torch there has code for"),  # and this is no difference
}


@pytest.mark.parametrize("host", LOOKS)
def test_a_look_at_a_host_says_what_a_prompt_would(host, ssh, monkeypatch):
    state, reason = LOOKS[host]
    monkeypatch.setattr(hosts, "CHECK_TIMEOUT", 2.0 if host == "asleep" else 60.0)
    began, kind = time.monotonic(), "xpu" if host == "gpubox" else "cpu"
    found = hosts.check(host, WorkerSite(path=("/no/comfyui",)), kind)
    assert (found[0], found[2]) == (state, [])
    assert re.search(reason, found[1], re.DOTALL)
    assert host != "asleep" or time.monotonic() - began < 10
    children = [each for each in psutil.Process().children() if each.name() in ("ssh", "sleep", "cp-waiting")]
    assert psutil.wait_procs(children, 5)[1] == []


DEVICES = """
from cp_runtime.pool.devices import devices_of

torch.cuda.get_arch_list = lambda: ["sm_80", "sm_86"]
assert devices_of("cuda") == [{"name": "cuda:1", "title": "RTX 3090", "memory": 24 << 30}], devices_of("cuda")
assert devices_of("cpu") == [{"name": "cpu", "title": "", "memory": 0}]
assert devices_of("npu") == []
"""


def test_devices_that_torch_has_code_for_are_named(run_on_cards):
    run_on_cards(DEVICES, cards='kinds=("Tesla T4", "RTX 3090")')
