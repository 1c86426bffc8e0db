"""Case 35: random, oversized, truncated and hostile messages."""

import contextlib
import json
import os
import pickle
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.evil import Evil
from support.faults import SOAK, Stopwatch, note
from support.pools import echo, small_pool

from cp_runtime.errors import PoolError, PoolTimeout, ProtocolError, RankError
from cp_runtime.nested import tensors
from cp_runtime.pool.channel import Channel, Closed
from cp_runtime.pool.messages import MAX_HEADER, Done, Echo, unpack
from cp_runtime.pool.protocol import TensorPacker, flatten, read_tensor, unflatten
from cp_runtime.pool.worker_pool import WorkerPool

BLOCK = 4096  # bytes of shared memory that come with a message


def nested(depth: int, kind: str = "") -> object:
    """A value that holds a value that holds a value."""
    value: object = 1
    for _ in range(depth):
        value = {kind: [value]} if kind else [value]
    return value


HOSTILE = {
    "offset below zero": {"$tensor": ["float32", [2], -64]},
    "offset just behind the end": {"$tensor": ["uint8", [1], BLOCK]},
    "offset far behind the end": {"$tensor": ["float32", [2], 2**62]},
    "offset that overflows": {"$tensor": ["float32", [2], 2**70]},
    "offset not aligned": {"$tensor": ["float32", [2], 4]},
    "offset of another type": {"$tensor": ["float32", [2], "0"]},
    "offset None": {"$tensor": ["float32", [2], None]},
    "offset a fraction": {"$tensor": ["float32", [2], 64.5]},
    "last byte behind the end": {"$tensor": ["uint8", [65], BLOCK - 64]},
    "shape larger than the block": {"$tensor": ["float32", [BLOCK], 0]},
    "shape that overflows to a small one": {"$tensor": ["float32", [2**32, 2**32, 4], 0]},
    "shape of 2 ** 62": {"$tensor": ["float32", [2**62, 4], 0]},
    "shape empty by 0, else beyond int64": {"$tensor": ["float32", [0, 2**70], 0]},
    "shape below zero": {"$tensor": ["float32", [-1], 0]},
    "shape twice below zero": {"$tensor": ["float32", [-2, -2], 0]},
    "shape of text": {"$tensor": ["float32", "ab", 0]},
    "shape of fractions": {"$tensor": ["float32", [1.5], 0]},
    "shape that is no list": {"$tensor": ["float32", 2**80, 0]},
    "shape of lists": {"$tensor": ["float32", [[2]], 0]},
    "strides": {"$tensor": ["float32", [2], 0, [2**40]]},
    "strides in place of the offset": {"$tensor": ["float32", [2], [2**40, 1]]},
    "unknown dtype": {"$tensor": ["object", [2], 0]},
    "dtype that is a function of torch": {"$tensor": ["load", [2], 0]},
    "dtype that is a path": {"$tensor": ["../../etc/passwd", [2], 0]},
    "dtype of another type": {"$tensor": [["float32"], [2], 0]},
    "leaf of another length": {"$tensor": ["float32"]},
    "leaf of another type": {"$tensor": 5},
    "leaf that is a file": {"$file": "/etc/passwd"},
    "leaf that is a handle": {"$shm": ["/dev/shm/x", 3]},
    "leaf that is a class": {"$class": "os.system"},
    "leaf with code": {"py/reduce": ["os.system", ["true"]]},
    "leaf with a pickle": {"$pickle": pickle.dumps(Evil(Path("/nonexistent/x"))).hex()},
    "module attribute as dtype": {"$dtype": "hub"},
    "dtype that is a list": {"$dtype": ["float32"]},
    "device with a command": {"$device": "cpu\n; reboot"},
    "device that overflows": {"$device": "cuda:99999999999999999999"},
    "number that is no text": {"$float": None},
    "number with a word": {"$float": "five"},
    "number too large for a float": {"$float": 10**400},
    "list as a key": {"$dict": [[[1], 2]]},
    "dict as a key": {"$dict": [[{"$dict": []}, 2]]},
    "pairs of one": {"$dict": [[1]]},
    "dict that is a number": {"$dict": 7},
    "tuple that is a number": {"$tuple": 7},
    "two kinds at once": {"$tuple": [], "$dict": []},
    "plain object": {"a": 1, "b": 2},
    "conditioning that nobody kept": {"$cached": "c999999"},
    "a list as name of what is to be kept": {"$store": [["x"], {"$tensor": ["float32", [2], 0]}]},
    "text in a shape, which Python would repeat": {"$tensor": ["float32", ["1", 2**50], 0]},
    "a list in a shape, which Python would repeat": {"$tensor": ["float32", [[2], 2**50], 0]},
}
# Deeper than any message of ours. They may be taken; but Python's own limit must not be what stops them.
DEEP = {
    **{f"{depth} lists in each other": nested(depth) for depth in (200, 450, 600, 900)},
    **{f"{depth} tuples in each other": nested(depth, "$tuple") for depth in (200, 300, 450)},
}


def hostile_tree(rng: random.Random) -> object:
    """A tree that looks like a message and is not one, or just is one."""
    numbers = [0, 1, 64, 128, -1, -64, BLOCK, BLOCK - 64, 2**31, 2**63, 2**70, rng.randrange(2**40), 0.5, None, "1"]

    def number() -> object:
        return rng.choice(numbers)

    kind = rng.randrange(8)
    if kind < 4:
        dtype = rng.choice(["float32", "uint8", "bool", "int64", "qint8", "complex128", "float8_e4m3fn", "load", "", 3, None])
        shape = [n for n in (number() for _ in range(rng.randrange(4))) if n != "1"]  # Python repeats text: gigabytes of it
        shape = shape if rng.random() < 0.8 else [rng.randrange(4) for _ in range(3)]
        return {rng.choice(["$tensor", "$tensor", "$tensor", "$shared", "$store"]): [dtype, shape, number()][: rng.randrange(2, 5)]}
    if kind == 4:
        return {rng.choice(["$tuple", "$dict", "$float", "$dtype", "$device", "$cached", "$x", ""]): number()}
    if kind == 5:
        return [hostile_tree(rng) for _ in range(rng.randrange(3))]
    if kind == 6:
        return {"$dict": [[hostile_tree(rng), hostile_tree(rng)]]}
    return rng.choice([rng.choice(list(HOSTILE.values())), "/etc/passwd", "$(reboot)", "\x00", True, -0.0, 2**64])


def honest_frame(rng: random.Random) -> bytes:
    """A frame as the controller sends it."""
    packer = TensorPacker()
    value = {"x": torch.zeros(rng.randrange(1, 20)), "options": {"sigmas": (1.5, None, float("inf")), "dtype": torch.float16}}
    tree = flatten({**value, "cond": [torch.zeros(2, 3, dtype=torch.int64)] * 2}, packer.add)
    return frame(header("Echo", rng.randrange(1000), packer.nbytes, value=tree, drop=[]))


def header(kind: object, seq: object = 1, nbytes: object = 0, **fields: object) -> dict[str, object]:
    """That of a message, with whatever in it."""
    return {"kind": kind, "seq": seq, "nbytes": nbytes, "fields": fields}


def frame(header: object) -> bytes:
    """Any JSON value as a frame."""
    data = json.dumps(header).encode()
    return struct.pack("<Q", len(data)) + data


def hostile_frames(rng: random.Random, count: int) -> Iterator[bytes]:
    """Random, oversized, cut off, bit-flipped, and well-formed but hostile."""
    evil = pickle.dumps(Evil(Path("/nonexistent/x")))
    for i in range(count):
        match i % 6:
            case 0:
                data = rng.randbytes(rng.randrange(200))
                yield data if rng.random() < 0.5 else struct.pack("<Q", len(data)) + data
            case 1:
                yield (
                    struct.pack("<Q", rng.choice([MAX_HEADER + 1, 2**63, 2**64 - 1, rng.randrange(MAX_HEADER + 1, 2**64)])) + b"{}"
                )
            case 2:
                whole = honest_frame(rng)
                yield whole[: rng.randrange(len(whole))]
            case 3:
                flipped = bytearray(honest_frame(rng))
                for _ in range(rng.randrange(1, 9)):
                    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
                yield bytes(flipped)
            case 4:
                kind, seq = rng.choice(["Echo", "Echo", "exec", None, 5]), rng.choice([1, 2, "x", None, 2**70, 0.5])
                value = {"$dict": [["x", hostile_tree(rng)]]}
                yield frame(header(kind, seq, BLOCK, value=value, drop=rng.choice([None, [], ["c1"], 5])))
            case _:
                deep = rng.choice([b"[", b'{"a":', b'{"value":['])
                body = rng.choice([evil, deep * 5000, b'{"a":' + b"9" * 5000 + b"}", b"[1]", b"null", b"\xff\xfe{", b'{"a":NaN}'])
                yield struct.pack("<Q", len(body)) + body


class Executed:
    """Notes whatever Python runs, imports, opens or starts in this thread while it is on. An audit hook cannot be removed."""

    EVENTS = (
        "exec", "compile", "import", "open", "os.", "subprocess.", "pickle.", "marshal.", "ctypes.", "socket.connect", "code.",
    )  # fmt: skip

    def __init__(self) -> None:
        self.thread, self.events = 0, []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[object, ...]) -> None:
        if self.thread == threading.get_ident() and event.startswith(self.EVENTS):
            self.events.append((event, str(args)[:100]))

    def __enter__(self) -> list[tuple[str, str]]:
        self.events = []
        self.thread = threading.get_ident()
        return self.events

    def __exit__(self, *_: object) -> None:
        self.thread = 0


EXECUTED = Executed()


def take(data: bytes, block: torch.Tensor) -> str:
    """Feed bytes to a real channel and read what comes out as a rank does; say what became of them."""
    one, other = socket.socketpair()
    channel = Channel(other)
    one.setblocking(False)
    left, result = memoryview(data), "taken"
    try:
        with contextlib.suppress(BlockingIOError):
            left = left[one.send(left) :]
        one.shutdown(socket.SHUT_WR)
        while True:
            message = channel.receive(time.monotonic() + 5).message
            if isinstance(message, Echo):
                value = unflatten(message.value, lambda leaf: read_tensor(block, leaf))
                for tensor in tensors(value):
                    first = tensor.data_ptr() - block.data_ptr()
                    assert tensor.numel() == 0 or 0 <= first <= first + tensor.nbytes <= block.numel()
    except Closed:
        return result
    except (ProtocolError, PoolTimeout) as error:
        return type(error).__name__
    finally:
        one.close()
        channel.close()


def test_hostile_frames_give_typed_errors_and_run_nothing():
    count = 10_000 if SOAK else 1_000
    case = f"35 {count:,} hostile frames"
    block = torch.zeros(BLOCK, dtype=torch.uint8)
    for data in hostile_frames(random.Random(1), 300):  # what is imported at first use
        take(data, block)
    for name in ("utf_8", "utf_8_sig", "utf_16", "utf_16_le", "utf_16_be", "utf_32", "utf_32_le", "utf_32_be"):  # json looks
        "x".encode(name)
    outcomes, slowest = [], 0.0
    with EXECUTED as events:
        for data in hostile_frames(random.Random(35), count):
            began = time.monotonic()
            outcomes.append(take(data, block))
            slowest = max(slowest, time.monotonic() - began)
    Stopwatch(case).within(1, "the slowest frame", slowest)
    note(case, "untyped errors, code run, reads outside of the block", 0, len(events))
    assert events == []
    assert not block.any()
    assert "PoolTimeout" not in outcomes
    assert set(outcomes[1::6]) == {"ProtocolError"}  # oversized: refused at once, and not waited for
    # Both happened often, so the frames are neither all garbage nor all harmless.
    assert outcomes.count("ProtocolError") > count / 4
    assert outcomes.count("taken") > count / 20


def test_what_notes_running_code_does_note_it(tmp_path):
    with EXECUTED as events, contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(Evil(tmp_path / "marker")))  # noqa: S301
    assert {"pickle.find_class", "os.system"} <= {event for event, _ in events}
    assert (tmp_path / "marker").exists()


def read_value(tree: object) -> None:
    """Take a value as a rank does."""
    message = unpack(json.dumps(header("Echo", value=tree, drop=[])).encode()).message
    block = torch.zeros(BLOCK, dtype=torch.uint8)
    assert isinstance(message, Echo)
    unflatten(message.value, lambda leaf: read_tensor(block, leaf))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_values_are_refused(name):
    with pytest.raises(ProtocolError):
        read_value(HOSTILE[name])


@pytest.mark.parametrize("name", DEEP)
def test_deep_values_are_refused_or_taken(name):
    with contextlib.suppress(ProtocolError):
        read_value(DEEP[name])


def send_raw(pool: WorkerPool, data: bytes) -> None:
    """Write to every rank what the controller would never write."""
    for channel in pool.channels:
        channel.sock.settimeout(5)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            channel.sock.sendall(data)
        channel.sock.setblocking(False)


def hostile_request(pool: WorkerPool, tree: object, **fields: Any) -> str:
    """Have all ranks read a value; the type of the error, or what came."""
    request = Echo(**{"value": {"$dict": [["x", tree]]}, "drop": (), **fields})
    packer = TensorPacker()
    packer.nbytes = BLOCK
    try:
        pool.request(request, packer, timeout=10)
    except RankError as error:
        return error.kind if len(str(error)) < 50_000 else f"{error.kind} of {len(str(error)):,} characters, which floods the log"
    return "taken"


def test_living_ranks_answer_hostile_values_and_live_on():
    """Every rank answers with a typed error, and the same processes serve the next command."""
    count = 2_000 if SOAK else 200
    with small_pool() as pool:
        pool.inherited.request.view(BLOCK)  # that much memory is there, as after any message
        pids, wrong = list(pool.pids), {}
        watch = Stopwatch(f"35 {count + len(HOSTILE) + len(DEEP):,} hostile messages to living ranks")
        for name, tree in {**HOSTILE, **DEEP}.items():
            kind = hostile_request(pool, tree)
            if kind != "ProtocolError" and not (kind == "taken" and name in DEEP):
                wrong[name] = kind
        rng = random.Random(36)
        for _ in range(count):
            tree = hostile_tree(rng)
            if (kind := hostile_request(pool, tree)) not in ("ProtocolError", "taken"):
                wrong[str(tree)[:100]] = kind
        for name, header in {"drop a key": {"drop": ["c1"]}, "drop a number": {"drop": 5}, "no value": {"value": 7}}.items():
            if hostile_request(pool, 1, **header) == "taken":
                wrong[name] = "taken"
        watch.within(30 if SOAK else 10, "all are answered")
        assert wrong == {}
        assert torch.equal(echo(pool, torch.arange(5)), torch.arange(5))
        assert pool.pids == pids


def test_a_message_cannot_make_ranks_allocate():
    """The sender makes room for a message. A rank that did so on its word could be made to fill the machine's memory."""
    with small_pool() as pool:
        echo(pool, torch.ones(3))
        block = os.dup(pool.inherited.request.fd)
        before = os.fstat(block).st_size
        pool._send(Echo(value=1, drop=()), 64 << 20)
        with pytest.raises(RankError, match=r"ProtocolError: a message of 67108864 bytes in \d+ bytes of shared memory"):
            pool._collect("echo", time.monotonic(), 10, None)
        after = os.fstat(block).st_size
        os.close(block)
        assert after == before
        assert torch.equal(echo(pool, torch.ones(3)), torch.ones(3))  # the header was read whole: the ranks are in step


def test_a_message_that_is_no_command_is_reported():
    """It was read whole, so that the ranks are in step and serve the next command."""
    with small_pool() as pool:
        pids = list(pool.pids)
        pool._send(Done())  # type: ignore[arg-type]  # a report
        with pytest.raises(RankError, match="ProtocolError: unknown command 'Done'"):
            pool._collect("echo", time.monotonic(), 10, None)
        assert torch.equal(echo(pool, torch.ones(3)), torch.ones(3))
        assert pool.pids == pids


def evil_frame(marker: Path) -> bytes:
    data = pickle.dumps(Evil(marker))
    return struct.pack("<Q", len(data)) + data


RAW = {
    "random bytes": lambda _: random.Random(5).randbytes(4096),
    "a pickle": evil_frame,
    "an unknown command": lambda marker: frame(header(f"__import__('os').system('touch {marker}')")),
    "a header of other types": lambda _: frame(header("Echo", {"a": [1]}, "all", drop=1, value=1)),
    "a frame that is cut off": lambda _: frame(header("Echo"))[:-3],
    "a frame above the limit": lambda _: struct.pack("<Q", MAX_HEADER + 1) + b"x" * 1000,
    "brackets": lambda _: struct.pack("<Q", 100_000) + b"[" * 100_000,
    "a memory size that overflows": lambda _: frame(header("Echo", 1, 2**70, value=1, drop=[])),
    "a memory size below zero": lambda _: frame(header("Echo", 1, -(2**40))),
    "NaN": lambda _: frame(header("Echo", float("nan"))),
    "a flood of cancels": lambda _: frame(header("Cancel")) * 5000 + frame([]),
}


@pytest.mark.parametrize("name", RAW if SOAK else list(RAW)[:5])
def test_living_ranks_end_at_frames_they_cannot_read(name, tmp_path):
    """Both ranks end by themselves: no signal, no hang. The pool that every case starts with is the next one of the case before."""
    marker = tmp_path / "marker"
    with small_pool() as pool:
        assert torch.equal(echo(pool, torch.arange(5)), torch.arange(5))
        send_raw(pool, RAW[name](marker))
        if name == "a frame that is cut off":  # the rank waits for the rest, until there can be none
            for channel in pool.channels:
                channel.sock.shutdown(socket.SHUT_WR)
        watch = Stopwatch(f"35 {name} on the socket of a living rank")
        for process in pool.processes:
            process.wait(10)
        watch.within(2, "all ranks have ended")
        assert [process.returncode for process in pool.processes] in ([1, 1], [0, 1], [0, 0])
        began = time.monotonic()
        with pytest.raises(PoolError):
            echo(pool, torch.arange(5), timeout=5)
        assert time.monotonic() - began < 5
        assert not pool.alive
    assert not marker.exists()
