"""The connection of two machines: who may speak, what overtakes what, and what a packet may cost."""

import contextlib
import json
import os
import random
import socket
import stat
import threading
import time

import pytest
from support.joined import pair

from cp_runtime.errors import ConfigError, ProtocolError
from cp_runtime.machines import wire as wires
from cp_runtime.machines.wire import Code, Refused, Wire, parse_address

CODE = Code("127.0.0.1", 1234, "a token")


@pytest.fixture
def connected():
    ends = pair("token", "token")
    yield ends
    for end in ends:
        end.close()


def test_a_code_survives_being_copied():
    assert Code.parse(f" {CODE}\n") == CODE


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


@pytest.mark.parametrize("kind", ["not UTF-8", "empty", "others can read it", "a pipe", "a link", "a word"])
def test_a_token_that_is_not_ours_alone_is_replaced(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    good = wires.kept_token()
    file = wires._token_file()
    assert wires.kept_token() == good == file.read_text()
    file.unlink()
    if kind == "a pipe":
        os.mkfifo(file, 0o600)
    elif kind == "a link":
        (tmp_path / "other").write_text(good)
        file.symlink_to(tmp_path / "other")
    else:
        file.write_bytes({"not UTF-8": b"\xff" * 32, "empty": b"", "a word": b"token"}.get(kind, good.encode()))
        file.chmod(0o666 if kind in ("empty", "others can read it") else 0o600)
    made = wires.kept_token()
    assert made == wires.kept_token() != good
    assert (stat.S_IMODE(file.lstat().st_mode), stat.S_ISREG(file.lstat().st_mode)) == (0o600, True)


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
    assert host.sent == (len(data) // wires._PIECE) * wires._HEAD.size + len(json.dumps({"x": "é"})) + len(data)
    join.close()
    with pytest.raises(OSError, match="closed the connection"):
        host.receive()


def test_silence_is_noticed(connected):
    connected[0]._socket.settimeout(0.1)
    with pytest.raises(TimeoutError):
        connected[0].receive()


def test_a_proof_that_is_passed_on_to_another_port_is_worth_nothing():
    """A stranger listens where somebody with the code connects to, and connects to who knows it as well."""
    with socket.create_server(("127.0.0.1", 0)) as true, socket.create_server(("127.0.0.1", 0)) as false:
        ends = {}

        def run(name, function, *args):
            try:
                ends[name] = function(*args)
            except (Refused, OSError) as error:
                ends[name] = error

        victim = threading.Thread(target=run, args=("join", Wire.connect, Code(*false.getsockname(), "token")))
        victim.start()
        to_victim, _ = false.accept()
        with to_victim, socket.create_connection(true.getsockname()) as to_host:
            sock, _ = true.accept()
            host = threading.Thread(target=run, args=("host", Wire.accept, sock, "token"))
            host.start()
            to_victim.sendall(to_host.recv(32))
            to_host.sendall(to_victim.recv(64, socket.MSG_WAITALL))
            host.join()
            sock.close()
            assert to_host.recv(32) == b""
        victim.join()
    assert isinstance(ends["host"], Refused)
    assert isinstance(ends["join"], Refused)


def slow(host, join):
    """Let little lie in the kernel between two ends, as on a slow link."""
    host._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
    join._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)


def test_what_is_urgent_overtakes_a_large_packet(connected):
    """By any number of threads, and none of them waits for it."""
    host, join = connected
    slow(host, join)
    data = os.urandom(1 << 20)
    sender = threading.Thread(target=host.send, args=({"large": True}, data[:5], data[5:]))
    sender.start()
    while not host._lock.locked():
        time.sleep(0.001)
    for number in range(20):
        host.send_now({"kill": number})  # returns although nobody receives
    after = threading.Thread(target=host.send, args=({"after": True}, b"x"))
    after.start()
    assert [join.receive() for _ in range(20)] == [({"kill": number}, b"") for number in range(20)]
    assert sender.is_alive()
    assert join.receive() == ({"large": True}, data)
    assert join.receive() == ({"after": True}, b"x")
    sender.join()
    after.join()


def test_a_packet_that_nobody_wants_any_more_is_abandoned(connected):
    host, join = connected
    slow(host, join)
    unwanted = threading.Event()
    sender = threading.Thread(target=host.send, args=({"large": True}, bytes(64 << 20)), kwargs={"abandoned": unwanted.is_set})
    sender.start()
    while not host._lock.locked():
        time.sleep(0.001)
    unwanted.set()
    host.send_now({"end": True})
    following = threading.Thread(target=host.send, args=({"next": True}, b"12"))
    following.start()
    assert join.receive() == ({"end": True}, b"")
    assert join.receive() == ({"next": True}, b"12")
    sender.join()
    following.join()
    assert host.sent < 1 << 20
    host.send({"none": True}, b"1", abandoned=unwanted.is_set)
    host.send({"last": True})
    assert join.receive() == ({"last": True}, b"")


def test_a_stranger_has_one_deadline_in_all(monkeypatch):
    """However often it sends a byte."""
    monkeypatch.setattr(wires, "SILENT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as stranger:
        sock, _ = listener.accept()
        stop = threading.Event()

        def drip():
            while not stop.wait(0.05):
                stranger.send(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        with sock, pytest.raises(TimeoutError):
            Wire.accept(sock, "token")
        stop.set()
        thread.join()


def test_a_packet_costs_what_has_arrived_of_it_and_no_more_than_is_allowed():
    """Whoever knows the code may still be wrong, or broken."""
    host, join = pair("t", "t")
    host._most = 1 << 17
    thread = threading.Thread(target=send_until_closed, args=(join, bytes(1 << 18)))
    thread.start()
    with pytest.raises(ProtocolError, match="more than 131072 bytes"):
        host.receive()
    host.close()
    join.close()
    thread.join()


def send_until_closed(wire, data):
    with contextlib.suppress(OSError):
        wire.send({"a": 1}, data)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ((1 << 31, 0, 0), "not allowed"),
        ((0, 1 << 31, 1), "not allowed"),
        ((2, 0, 9), "not allowed"),
        ((0, 1, 0), "a piece of no packet"),
    ],
)
def test_pieces_that_cannot_be_are_refused(head, reason, connected):
    with pytest.raises(ProtocolError, match=reason):
        _receive(*connected, wires._HEAD.pack(*head) + b"x")


def test_garbage_is_refused():
    """As the frames inside are: see `test_messages.py`."""
    draw = random.Random(0)
    for _ in range(50):
        ends = pair("t", "t")
        head = draw.choice([b"[1]", b"{", b"\xff", b"[" * 9999, bytes(draw.randbytes(9))])
        with pytest.raises((ProtocolError, OSError)):
            _receive(*ends, wires._HEAD.pack(len(head), 0, 0) + head)
        for end in ends:
            end.close()


def _receive(host, join, raw):
    join._socket.sendall(raw)
    host.receive()
