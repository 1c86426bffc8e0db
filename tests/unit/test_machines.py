"""Other machines, as far as that takes no process: who may join, what must be alike, and which file is meant."""

import contextlib
import errno
import hashlib
import os
import socket
import threading
import time
from io import FileIO
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
from support.faults import wait_for
from support.joined import Joined, hello, pair

from cp_runtime.comfy.shared.recipe import describe, relocate
from cp_runtime.errors import ConfigError, MirrorError, PoolError
from cp_runtime.machines import meeting
from cp_runtime.machines import wire as wires
from cp_runtime.machines.bridge import Bridge
from cp_runtime.machines.facts import differences
from cp_runtime.machines.host import Machines
from cp_runtime.machines.listener import Listener
from cp_runtime.machines.meeting import meet
from cp_runtime.machines.relay import Place, Relay
from cp_runtime.machines.wire import Code, Wire, interface_of
from cp_runtime.pool.blocks import Shared
from cp_runtime.pool.config import DeviceInventory, RuntimeConfig, WorkerSite
from cp_runtime.pool.frames import Frame
from cp_runtime.pool.messages import Load, pack, unpack
from cp_runtime.system import system

FACTS = {"pack": "1", "comfyui": "0.30", "torch": "2.11", "nccl": "2.28", "comfy-kitchen": "1", "kind": "cuda", "dtypes": "float32"}


def test_an_address_that_is_not_here_is_named():
    assert interface_of("127.0.0.2") == "lo"
    with pytest.raises(PoolError, match=r"no interface of this computer has the address 203\.0\.113\.7"):
        Machines(dict).open("203.0.113.7", 8289)


def test_every_difference_is_said_at_once_with_its_remedy():
    assert differences(FACTS, FACTS | {"python": "3.12"}) == []
    found = differences(FACTS, dict.fromkeys(FACTS, "other"))
    assert len(found) == len(FACTS)
    assert any(
        "torch: 2.11 on the computer with ComfyUI, other here. " in text and "pip install torch==2.11" in text for text in found
    )


def test_a_file_is_found_by_its_name(folders):
    here, there, recipe = folders
    found = relocate(recipe, describe(recipe, here), there, "pc2")
    assert found["path"] == f"{there['diffusion_models'][0]}/flux/the model.sft"
    assert found["stamp"][0] == 1 << 20


def test_a_file_that_is_missing_comes_with_a_command(folders):
    here, there, recipe = folders
    os.remove(f"{there['diffusion_models'][0]}/flux/the model.sft")
    with pytest.raises(
        MirrorError, match=r"pc2 has no model file flux/the model\.sft\. Copy it there.* scp .*/one/.* .?pc2:.*/two/"
    ):
        relocate(recipe, describe(recipe, here), there, "pc2")


def test_no_name_leads_out_of_the_model_folders(folders, tmp_path):
    _, there, recipe = folders
    (tmp_path / "two" / "secret").write_bytes(b"x")
    digest = hashlib.sha256(b"x").hexdigest()
    with pytest.raises(MirrorError, match="has no model file"):
        relocate(recipe, {"kind": "diffusion_models", "name": "../secret", "size": 1, "digest": digest}, there, "pc2")


def test_a_loader_of_a_node_pack_is_refused(folders):
    here, there, recipe = folders
    with pytest.raises(MirrorError, match="by a node of another pack"):
        relocate(recipe | {"loader": "factory"}, describe(recipe, here), there, "pc2")


OTHERS = DeviceInventory(type="cuda", count=1, others=("pc2/cuda:0", "pc2/cuda:1", "pc3/cuda:0"))


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        ({}, ("cuda:0", "pc2/cuda:0", "pc2/cuda:1", "pc3/cuda:0")),
        ({"world_size": 2}, ("cuda:0", "pc2/cuda:0")),
        ({"world_size": 1}, ("cuda:0",)),
        ({"devices": "cuda:0, pc2/cuda:0, pc3/cuda:0, pc2/cuda:1"}, ("cuda:0", "pc2/cuda:0", "pc2/cuda:1", "pc3/cuda:0")),
    ],
)
def test_devices_of_all_machines(given, devices):
    config = RuntimeConfig.resolve(inventory=OTHERS, **given)
    assert config.devices == devices
    assert config.device_type == "cuda"
    assert config.local == ("cuda:0",)
    assert config.machines == tuple(device.partition("/")[0] if "/" in device else "" for device in devices)


@pytest.mark.parametrize(
    ("devices", "message"),
    [("cuda:0,pc4/cuda:0", "pc2/cuda:0, pc2/cuda:1, pc3/cuda:0"), ("pc2/cuda:0,cuda:0", "a device of this computer first")],
)
def test_devices_that_are_not_there(devices, message):
    with pytest.raises(ConfigError, match=message):
        RuntimeConfig.resolve(inventory=OTHERS, devices=devices)


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """Listens on an address of its own; leaves no thread behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = threading.active_count()
    made = Machines(dict)
    with socket.create_server(("127.0.0.4", 0)) as free:
        port = free.getsockname()[1]
    made.open("127.0.0.4", port)
    yield made
    made.close()
    wait_for(lambda: threading.active_count() <= before, 5)


def states(machines):
    return {each["name"]: each["state"] for each in machines.status()["machines"]}


def test_a_computer_that_is_lost_is_waited_for_when_another_is_removed(machines):
    code = machines.code
    two, three = (Joined(code, name) for name in ("pc2", "pc3"))
    wait_for(lambda: states(machines) == {"pc2": "ready", "pc3": "ready"}, 5)
    three.close()
    wait_for(lambda: states(machines) == {"pc2": "ready", "pc3": "lost"}, 5)
    machines.remove("pc2")
    assert machines.code == code
    assert states(machines) == {"pc3": "lost"}
    machines.remove("pc3")
    assert machines.code is None
    two.close()


def test_one_of_two_computers_of_one_name_is_refused(machines):
    """Also while the first one joins. It may be the same one, as it was before: so it is to try again."""
    first, _ = hello(machines.code, "pc2")
    second, answer = hello(machines.code, "pc2")
    assert answer["again"] is True
    assert "another computer is called pc2 already" in answer["differ"][0]
    second.close()
    assert states(machines) == {"pc2": "joining"}
    first.close()
    wait_for(lambda: states(machines) == {}, 5)  # it gave up
    Joined(machines.code, "pc2").close()
    wait_for(lambda: states(machines) == {"pc2": "lost"}, 5)
    Joined(machines.code, "pc2").close()


def test_a_computer_that_is_removed_while_it_joins_stays_away(machines):
    kept = Joined(machines.code, "pc3")
    wire, _ = hello(machines.code, "pc2")
    machines.remove("pc2")
    with pytest.raises(OSError, match=r"closed|reset"):
        wire.receive()
    assert states(machines) == {"pc3": "ready"}
    again, answer = hello(machines.code, "pc2")
    assert "was removed" in answer["differ"][0]
    assert answer["again"] is False
    for each in (again, wire, kept):
        each.close()


def test_removing_what_is_not_there_changes_nothing(machines):
    code = machines.code
    with pytest.raises(ConfigError, match="Got 'pc9'; allowed: none"):
        machines.remove("pc9")
    wire, answer = hello(code, "PC 2")
    assert "in lower case" in answer["differ"][0]
    with pytest.raises(ConfigError, match="allowed: PC 2"):
        machines.remove("pc9")
    assert machines.code == code
    wire.close()
    machines.remove("PC 2")  # nobody is left
    assert machines.code is None


def test_a_third_computer_meets_the_others_and_disturbs_nobody(machines):
    two, three = Joined(machines.code, "pc2"), Joined(machines.code, "pc3")
    wait_for(lambda: states(machines) == {"pc2": "ready", "pc3": "ready"}, 5)
    assert two.heard == [{"meet": ["127.0.0.1", ANY]}]
    two.close()
    three.close()


def test_computers_that_do_not_reach_each_other_are_told_so(machines):
    """A newcomer whose ports a firewall filters."""
    wire, _ = hello(machines.code, "pc2")
    with socket.create_server((wire.own, 0)) as closed:
        port = closed.getsockname()[1]
    wire.send({"listening": port})
    answer = {}
    while "met" not in answer:
        answer, _ = wire.receive()
    assert "the computers at 127.0.0.4 and 127.0.0.1 do not reach each other" in answer["met"]
    wait_for(lambda: states(machines) == {"pc2": "refused"}, 5)
    wire.close()


@pytest.mark.parametrize(
    "changes",
    [{"facts": "torch"}, {"devices": ["a/cpu"]}, {"listening": 1 << 16}],
)
def test_a_hello_of_a_wrong_type_ends_its_connection_only(changes, machines):
    wire = Wire.connect(machines.code)
    wire.send({"hello": "pc2", "facts": {}, "devices": ["cpu"]} | {k: v for k, v in changes.items() if k != "listening"})
    with pytest.raises(OSError, match=r"closed|reset"):  # noqa: PT012
        wire.receive()
        wire.send(changes)
        while True:
            wire.receive()
    wait_for(lambda: states(machines) == {}, 5)
    Joined(machines.code, "pc2").close()
    wire.close()


def test_a_port_that_cannot_be_ends_its_connection_only(monkeypatch):
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with meeting.being_met("127.0.0.1", "token") as there:
        for back in (["127.0.0.1", 1 << 70], ["127.0.0.1", 1 << 16], ["127.0.0.1"], None):
            with contextlib.closing(Wire.connect(Code("127.0.0.1", there.port, "token"))) as wire:
                wire.send({"back": back})
                with pytest.raises(OSError, match=r"closed|reset"):
                    wire.receive()
    wait_for(lambda: not any(thread.name == "context-parallel-greeting" for thread in threading.enumerate()), 5)
    assert failed == []


@pytest.mark.parametrize("addresses", [1, 40])
def test_strangers_keep_nobody_out(addresses, machines):
    """They may hold as many connections as they like, without the code."""
    with contextlib.ExitStack() as opened:
        for number in range(80):
            sock = opened.enter_context(socket.socket())
            sock.bind((f"127.0.9.{1 + number % addresses}", 0))
            sock.connect((machines.code.address, machines.code.port))
        began = time.monotonic()
        Joined(machines.code, "pc2").close()
        assert time.monotonic() - began < 3  # and not behind the five seconds that theirs are waited for


def answering(token, answer):
    """Where a computer listens that is met, and does something else instead of connecting back."""
    return Listener("127.0.0.1", 0, token, answer)


def test_a_computer_that_knows_the_code_and_stalls_ends_its_own_meeting(monkeypatch):
    monkeypatch.setattr(meeting, "MEETING", 0.6)

    def drip(wire):  # a packet that begins, and goes on for ever
        address, port = wire.receive()[0]["back"]
        with contextlib.closing(Wire.connect(Code(address, port, "token"))) as back, contextlib.suppress(OSError):
            for byte in wires._HEAD.pack(1000, 0, 0) + bytes(1000):
                back._socket.sendall(bytes([byte]))
                time.sleep(0.05)

    for answer in (drip, lambda wire: time.sleep(2)):
        with answering("token", answer) as there:
            began = time.monotonic()
            assert "do not reach each other (nothing came back in 0.6 s)" in meet(
                "127.0.0.1", Code("127.0.0.1", there.port, "token")
            )
            assert time.monotonic() - began < 1.5


def test_strangers_do_not_spoil_a_meeting():
    """Somebody may find the port first, and say nothing."""
    silent = []

    def connect_back(wire):
        address, port = wire.receive()[0]["back"]
        silent.extend(socket.create_connection((address, port)) for _ in range(3))
        with contextlib.closing(Wire.connect(Code(address, port, "token"))) as back:
            back.send({}, bytes(1 << 16))

    with answering("token", connect_back) as there:
        assert meet("127.0.0.1", Code("127.0.0.1", there.port, "token")) == ""
    for sock in silent:
        sock.close()


@pytest.mark.parametrize("packet", [{"now": "x"}, {"log": 20}])
def test_whatever_a_computer_sends_it_alone_is_lost(packet, machines):
    wire = Joined(machines.code, "pc2")
    wire.wire.send(packet)
    wait_for(lambda: states(machines) == {"pc2": "lost"}, 5)
    wire.close()


def test_nothing_runs_or_listens_before_someone_asks_and_afterwards(tmp_path, monkeypatch):
    wait_for(lambda: not any(thread.name.startswith("context-parallel") for thread in threading.enumerate()), 8)  # of other tests
    before = threading.active_count()
    machines = Machines(dict)
    assert (machines.devices, machines.status(), machines.here) == ((), {"code": None, "machines": []}, {})
    machines.close()
    assert threading.active_count() == before
    with pytest.raises(PoolError, match="no other computer can work"):
        machines.interface  # noqa: B018
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.3", 0)) as free:
        port = free.getsockname()[1]
    code = machines.open("127.0.0.3", port)
    assert machines.open("127.0.0.3", port) == code
    assert threading.active_count() == before + 1
    socket.create_connection(("127.0.0.3", port)).close()
    machines.remove("")
    wait_for(lambda: threading.active_count() <= before, 5)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.3", port))
    assert wires.kept_token() != code.token  # the one that was given away is worthless
    for _ in range(5):
        machines.open("127.0.0.3", port)
        machines.close()
    wait_for(lambda: threading.active_count() <= before, 5)


@pytest.mark.parametrize("changes", [{"loader": "factory"}, {"factory": {"file": "/usr/bin/x.py"}}, {}])
def test_a_load_reaches_ranks_by_a_file_that_is_here_only(changes, folders):
    """Whatever ComfyUI's side sends: ranks do not look at it again."""
    here, there, recipe = folders
    host, other = pair("token", "token")
    relay = Relay(other, Place("pc2", "cpu", ["cpu"], there, WorkerSite()), "token")
    given: list[Frame] = []
    relay._ranks.processes[0] = SimpleNamespace(send=given.append)
    load = pack(Load(key="k", recipe={**recipe, **changes}, patches=[], patches_uuid="u"))
    relay._take({"pool": "", "frame": len(load), "files": describe(recipe, here)}, bytearray(load))
    if changes:
        _, data = host.receive()
        assert "by a node of another pack" in unpack(bytes(data)).message.message
        assert not given
    else:
        wait_for(lambda: given, 5)
        assert unpack(given[0].header).message.recipe["path"] == f"{there['diffusion_models'][0]}/flux/the model.sft"
    for end in (host, other):
        end.close()


def test_patches_of_more_than_two_gigabytes_are_sent_whole():
    """One read of a file returns less. Nothing of this one is read: it is a hole."""
    sent = []

    def send(packet, *parts, **_):
        sent.extend(len(part) for part in parts)

    machine = SimpleNamespace(wire=SimpleNamespace(send=send), owner=SimpleNamespace(describe=lambda recipe: {}))
    shared = Shared()
    bridge = Bridge(machine, "p", shared)
    with FileIO(system.memory_fd(), "r+") as patches:
        patches.truncate((1 << 31) + 1)
        load = pack(Load(key="k", recipe={}, patches=[], patches_uuid="u", memory=(os.getpid(), patches.fileno())))
        bridge._forward(Frame(load))
    assert sent == [len(load), (1 << 31) + 1]
    bridge._close()
    shared.close()


def test_a_computer_without_room_for_a_process_says_so(monkeypatch):
    """Instead of leaving, which would end ranks that run."""

    def no_room(*_):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    host, other = pair("token", "token")
    relay = Relay(other, Place("pc2", "cpu", ["cpu"], {}, WorkerSite()), "token")
    monkeypatch.setattr("cp_runtime.machines.relay.WAITING.take", no_room)
    spec = {"rank": 1, "world_size": 2, "service": "", "preload": [], "argv": [""], "machines": ["", "pc2"]}
    relay._take({"pool": "p", "start": spec}, bytearray())
    ended, _ = host.receive()
    assert (ended["pool"], ended["rank"], ended["kind"]) == ("p", 1, "BlockingIOError")
    assert "could not be started" in ended["message"]
    assert "ulimit -u" in ended["message"]
    for end in (host, other):
        end.close()
