"""Messages between the controller and the ranks: each arrives as it was sent, or is refused."""

import json
import re
from dataclasses import replace

import pytest
from support.reports import call_report, failure

from cp_runtime.engine.compiled import CompileSettings
from cp_runtime.engine.ranks.config import SequenceSettings
from cp_runtime.errors import ProtocolError
from cp_runtime.pool import messages
from cp_runtime.pool.frames import MAX_HEADER
from cp_runtime.pool.messages import pack, unpack

TREE = {"$dict": [["x", {"$tensor": ["float32", [2], 0]}], ["n", 1.5]]}
MESSAGES = [
    messages.Shutdown(),
    messages.Import(),
    messages.Connect(port=0),
    messages.Imported(shares=True),
    messages.Connected(relayed=False),
    messages.Probe(),
    messages.Compare(),
    messages.Measure(),
    messages.Cancel(),
    messages.Arrived(place=3),
    messages.Leave(place=4),
    messages.Beat(),
    messages.Beat(modules=1, collectives=2, loaded=3, has_loaded=True, compiling=4),
    messages.Available(),
    messages.Echo(value=TREE, drop=("c1",)),
    messages.Echo(value=None, drop=None),
    messages.Locate(copies=(messages.Copy(region=(0, 64, 4096), folder="checkpoints", name="a/b", offset=8, digest="d"),)),
    messages.Located(found=(0, 2)),
    messages.Load(key="k", name="flux", network=TREE, blocks=(messages.Block(address=(7, 3), nbytes=4096, is_file=True),),
                  patches=(), patches_uuid="u", placement="sharded", device_bytes=7, memory=(1, 3), memory_nbytes=8192,
                  sent=((0, 64, 4096),)),
    messages.Call(
        key="k", method="forward", sequence=SequenceSettings(ring_degree=2), ranks=2, batch_degree=0,
        by_conditioning=True, leading=("x", "timestep"), in_place=("control",),
        memory=(1.5, 3.0), memory_scale=1.5, compile=CompileSettings(), compile_or_raise=True, cancel_every=3,
        value=TREE, drop=(),
    ),
    messages.Fetch(number=3),
    messages.AttachNetwork(key="k", leaves=(TREE, TREE), memory=(1, 2), placement="whole"),
    messages.Drop(keys=("a", "b")),
    messages.MakeRoom(key=None, ranks=(0, 1)),
    messages.Describe(key="k", roots=("m:C",), packs=("/packs/p",)),
    messages.Described(code={"m:C": "1"}, failed={"p": "no"}),
    messages.Done(),
    messages.Cancelled(),
    messages.Compared(speed=1.5),
    failure(at=12.5, collectives=3, pending=1, memory=messages.Memory(host=1, device=2, free=3), device_lost=True),
    messages.Ready(name="x", shares=(2, 1)),
    messages.Value(value=TREE, nbytes=64),
    messages.Loaded(digest="d", formats=("c",), casts=False, code="l", bytes=1, seconds=0.5),
    messages.Room(available=None),
    messages.Room(available=1 << 40, formats=("fp8",)),
    call_report(tokens={"img": 5}, compiled=messages.Compiled(kinds={"Block": 2}, left={"Other": "why"}, counts={"breaks": 0})),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message):
    header = unpack(pack(message, 7, 640, 2.5))
    assert (header.seq, header.nbytes, header.seconds, header.message) == (7, 640, 2.5, message)


def test_every_kind_is_tried():
    assert {type(message).__name__ for message in MESSAGES} == set(messages.KINDS)


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (b"[1]", "kind, seq, nbytes, seconds and fields"),
        (b"{}", "kind, seq, nbytes, seconds and fields"),
        (b"{", "not JSON"),
        (b"\xff\xfe{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"kind":"Message","seq":1,"nbytes":0,"seconds":0,"fields":{}}', "unknown message 'Message'"),
        (b'{"kind":["Done"],"seq":1,"nbytes":0,"seconds":0,"fields":{}}', "unknown message"),
        (b'{"kind":"Done","seq":1,"nbytes":0,"seconds":0,"fields":[]}', "unknown message"),
        (b'{"kind":"Done","seq":true,"nbytes":0,"seconds":0,"fields":{}}', "bytes"),
        (b'{"kind":"Done","seq":1.5,"nbytes":0,"seconds":0,"fields":{}}', "bytes"),
        (b'{"kind":"Done","seq":NaN,"nbytes":0,"seconds":0,"fields":{}}', "bytes"),
        (b'{"kind":"Done","seq":1,"nbytes":0,"seconds":-1,"fields":{}}', "a message with -1 seconds"),
        (b'{"kind":"Done","seq":1,"nbytes":-1,"seconds":0,"fields":{}}', "a message of -1 bytes"),
        (b'{"kind":"Done","seq":1,"nbytes":"all","seconds":0,"fields":{}}', "a message of all bytes"),
    ],
)
def test_what_is_no_message(header, named):
    with pytest.raises(ProtocolError, match=re.escape(named)):
        unpack(header)


def test_what_is_too_long_or_no_number_is_not_sent():
    with pytest.raises(ProtocolError, match="above the limit"):
        pack(messages.Drop(keys=("x" * MAX_HEADER,)))
    with pytest.raises(ValueError, match="JSON compliant"):
        pack(replace(failure(), at=float("nan")))


def test_commands_have_the_names_that_users_see():
    commands = messages.Available(), messages.MakeRoom(key=None, ranks=()), messages.Echo(value=1, drop=())
    assert [each.command for each in commands] == ["available", "make_room", "echo"]


def test_a_call_names_no_other_method():
    call = next(message for message in MESSAGES if isinstance(message, messages.Call))
    header = json.loads(pack(call))
    assert unpack(json.dumps(header).encode()).message == call
    with pytest.raises(ProtocolError, match="a malformed Call"):
        unpack(json.dumps({**header, "fields": {**header["fields"], "method": "compile"}}).encode()).message  # noqa: B018
