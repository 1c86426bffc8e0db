"""Other machines, as far as that takes no process: who may join, what must be alike, and which file is meant."""

import hashlib
import json
import os
import random
import socket
import threading
import time

import pytest
from support.faults import wait_for

from cp_runtime.comfy.model.wire_recipe import describe, file_stamp, relocate
from cp_runtime.errors import ConfigError, MirrorError, PoolError, ProtocolError
from cp_runtime.machines import wire as wires
from cp_runtime.machines.facts import differences
from cp_runtime.machines.host import Machines
from cp_runtime.machines.relay import Relay, log
from cp_runtime.machines.wire import Code, Refused, Wire, interface_of, parse_address
from cp_runtime.pool.board import Board, Progress
from cp_runtime.pool.channel import Channel, SharedBlock
from cp_runtime.pool.config import DeviceInventory, RuntimeConfig
from cp_runtime.pool.messages import Done, pack, unpack

CODE = Code("127.0.0.1", 1234, "a token")
FACTS = {"pack": "1", "comfyui": "0.30", "torch": "2.11", "nccl": "2.28", "comfy-kitchen": "1", "kind": "cuda", "dtypes": "float32"}


def pair(host_token, join_token):
    """(host's end or error, the other end or error) of a connection between two that know these tokens."""
    listener = socket.create_server(("127.0.0.1", 0))
    ends = {}

    def join():
        try:
            ends["join"] = Wire.connect(Code(*listener.getsockname(), join_token))
        except Exception as error:  # noqa: BLE001
            ends["join"] = error

    thread = threading.Thread(target=join)
    thread.start()
    with listener:
        sock, _ = listener.accept()
    try:
        host = Wire.accept(sock, host_token)
    except Refused as error:
        host = error
        sock.close()
    thread.join()
    return host, ends["join"]


@pytest.fixture
def connected():
    ends = pair("token", "token")
    yield ends
    for end in ends:
        end.close()


def test_a_code_survives_being_copied():
    assert Code.parse(f" {CODE}\n") == CODE
    assert CODE.token not in CODE.run_id


@pytest.mark.parametrize("text", ["", "pc", "1.2.3.4", "1.2.3.4:0", "1.2.3.4:99999", "0.0.0.0:80", "pc:80", "::1:80"])
def test_an_address_is_that_of_one_interface(text):
    with pytest.raises(ConfigError, match="the IPv4 address of one interface and a port"):
        parse_address(text)
    with pytest.raises(ConfigError):
        Code.parse(f"{text}/token")


def test_a_token_that_cannot_be_kept_is_one_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert wires.kept_token() != wires.kept_token()
    wires.forget_token()


def test_an_address_that_is_not_here_is_named():
    assert interface_of("127.0.0.2") == "lo"
    with pytest.raises(PoolError, match=r"no interface of this computer has the address 203\.0\.113\.7"):
        Machines(dict).open("203.0.113.7", 8289)


def test_a_wrong_token_is_told_nothing():
    host, join = pair("token", "another")
    assert isinstance(host, Refused)
    assert isinstance(join, Refused)
    assert "does not accept this code" in str(join)


def test_a_host_that_does_not_know_the_token_is_told_nothing():
    """It could only guess the proof."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard = []

        def pretend():
            sock, _ = listener.accept()
            with sock:
                sock.sendall(bytes(32))
                heard.append(sock.recv(1 << 10))
                sock.sendall(bytes(32))
                heard.append(sock.recv(1 << 10))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(Refused, match="is not the ComfyUI that this code is from"):
            Wire.connect(Code(*listener.getsockname(), "token"))
        thread.join()
    assert [len(data) for data in heard] == [64, 0]
    assert b"token" not in heard[0]


def test_packets_arrive_as_they_were_sent_and_are_counted(connected):
    host, join = connected
    data = os.urandom(3 << 20)
    sender = threading.Thread(target=host.send, args=({"x": "é"}, data))
    sender.start()
    assert join.receive() == ({"x": "é"}, data)
    sender.join()
    assert host.sent == 16 + len(json.dumps({"x": "é"})) + len(data)
    join.close()
    with pytest.raises(OSError, match="closed the connection"):
        host.receive()


def test_silence_is_noticed(connected):
    connected[0]._socket.settimeout(0.1)
    with pytest.raises(TimeoutError):
        connected[0].receive()


def test_garbage_is_refused(connected):
    """As the frames inside are: see `test_messages`."""
    host, _ = connected
    with pytest.raises(ProtocolError, match="above the limit"):
        _receive(host, connected[1], wires._LENGTHS.pack(1 << 62, 0))
    draw = random.Random(0)
    for _ in range(50):
        ends = pair("t", "t")
        head = draw.choice([b"[1]", b"{", b"\xff", b"[" * 9999, bytes(draw.randbytes(9))])
        with pytest.raises((ProtocolError, OSError)):
            _receive(*ends, wires._LENGTHS.pack(len(head), 0) + head)
        for end in ends:
            end.close()


def _receive(host, join, raw):
    join._socket.sendall(raw)
    host.receive()


def test_every_difference_is_said_at_once_with_its_remedy():
    assert differences(FACTS, FACTS | {"python": "3.12"}) == []
    found = differences(FACTS, dict.fromkeys(FACTS, "other"))
    assert len(found) == len(FACTS)
    assert any(
        "torch: 2.11 on the computer with ComfyUI, other here. " in text and "pip install torch==2.11" in text for text in found
    )


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Model folders of two machines, with the same file in both, and its recipe."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = []
    for name in ("one", "two"):
        folder = tmp_path / name / "diffusion_models"
        (folder / "flux").mkdir(parents=True)
        (folder / "flux" / "dev.safetensors").write_bytes(random.Random(0).randbytes(3 << 20))
        made.append({"diffusion_models": [str(folder)]})
    path = f"{made[0]['diffusion_models'][0]}/flux/dev.safetensors"
    return *made, {"loader": "load_diffusion_model", "path": path, "stamp": list(file_stamp(path))}


def test_a_file_is_found_by_its_name(folders):
    here, there, recipe = folders
    found = relocate(recipe, describe(recipe, here), there, "pc2")
    assert found["path"] == f"{there['diffusion_models'][0]}/flux/dev.safetensors"
    assert found["stamp"][0] == 3 << 20


def test_a_file_that_is_missing_comes_with_a_command(folders):
    here, there, recipe = folders
    os.remove(f"{there['diffusion_models'][0]}/flux/dev.safetensors")
    with pytest.raises(
        MirrorError, match=r"pc2 has no model file flux/dev\.safetensors\. Copy it there.* scp .*/one/.* pc2:.*/two/"
    ):
        relocate(recipe, describe(recipe, here), there, "pc2")


@pytest.mark.parametrize("at", [0, 2 << 20, -1])
def test_another_file_of_that_name_is_refused(folders, at):
    here, there, recipe = folders
    with open(f"{there['diffusion_models'][0]}/flux/dev.safetensors", "r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        file.write(bytes(1 << 18) if at > 0 else b"\0")
    with pytest.raises(MirrorError, match="pc2 has another model file"):
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


def test_what_a_rank_notes_crosses_clocks():
    there, here = (Board(SharedBlock(), 2) for _ in range(2))
    there.beat(1, 7)
    there.enter_module(1)
    there.load(1, 0)
    here.write(1, there.words(1, there.read(1).beat + 2))
    found = here.read(1)
    assert (found.modules, found.collectives, found.loaded) == (1, 7, 0)
    assert 1.5 < there.read(1).beat - found.beat < 2.1
    here.write(0, there.words(0, 5.0))
    assert here.read(0) == Progress()
    here.decide(-3)
    assert here.decided == -3


def test_a_computer_that_is_lost_is_waited_for_when_another_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before, machines, relays = threading.active_count(), Machines(dict), {}
    with socket.create_server(("127.0.0.4", 0)) as free:
        port = free.getsockname()[1]
    code = machines.open("127.0.0.4", port)
    try:
        for name in ("pc2", "pc3"):
            relays[name] = Wire.connect(code)
            relays[name].send({"relay": name, "failed": "", "devices": ["cpu"], "pid": 1})
        wait_for(lambda: [*machines.here] == ["pc2", "pc3"], 5)
        relays["pc3"].close()
        wait_for(lambda: [*machines.here] == ["pc2"], 5)
        machines.remove("pc2")
        assert machines.code == code
        machines.remove("pc3")
        assert machines.code is None
    finally:
        machines.close()
        relays["pc2"].close()
        wait_for(lambda: threading.active_count() <= before, 5)


def test_nothing_runs_or_listens_before_someone_asks_and_afterwards(tmp_path, monkeypatch):
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
    assert threading.active_count() == before + 2
    socket.create_connection(("127.0.0.3", port)).close()
    while machines._agent is None:
        time.sleep(0.01)
    machines.remove("pc2")
    wait_for(lambda: threading.active_count() <= before, 5)
    assert machines._agent.returncode is not None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.3", port))
    assert wires.kept_token() != code.token  # the one that was given away is worthless
    for _ in range(5):  # before its agent has started
        machines.open("127.0.0.3", port)
        machines.close()
    wait_for(lambda: threading.active_count() <= before, 5)


def test_what_a_rank_noted_arrives_before_its_report(connected):
    """Its notes are cleared by then. If they came later, those of this command would give the next one the time of a load."""
    host, other = connected
    relay = Relay(other, {})
    log.removeHandler(log.handlers[-1])
    ours, theirs = socket.socketpair()
    relay._ranks.channels[0], rank = Channel(ours), Channel(theirs)
    rank.send(pack(Done()))
    relay._hear(0)
    (first, _), (second, data) = host.receive(), host.receive()
    assert ("board" in first, second["report"]) == (True, 0)
    assert isinstance(unpack(bytes(data)).message, Done)
    rank.close()
    ours.close()
