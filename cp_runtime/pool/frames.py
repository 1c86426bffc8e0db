"""Messages as bytes, and back, with every field checked.

A frame is a JSON object: the name of the message, the number of the command that it belongs to, the bytes of its tensors in shared
memory, and the fields of its dataclass. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ProtocolError
from .messages import KINDS, Message, R, Report, Request
from .typed import LARGEST, decode, encode, is_number

MAX_HEADER = 64 << 20  # bytes of a message without its tensors


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A message that has arrived."""

    kind: str  # name of its class
    seq: int  # number of the command; 0 = the start
    nbytes: int  # of its tensors
    fields: dict[str, Any]
    data: bytes  # as it came

    @property
    def message(self) -> Message:
        """The message. Raises ProtocolError: its fields are wrong."""
        try:
            message: Message = decode(KINDS[self.kind], self.fields)
            return message
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a malformed {self.kind}: {error}") from error


def pack(message: Message, seq: int = 0, nbytes: int = 0) -> bytes:
    """Convert a message to bytes. Raises ProtocolError: it is too long."""
    data = encode({"kind": type(message).__name__, "seq": seq, "nbytes": nbytes, "fields": message})
    if len(data) > MAX_HEADER:
        raise ProtocolError(f"a message header of {len(data)} bytes is above the limit of {MAX_HEADER}")
    return data


def unpack(data: bytes) -> Frame:
    """Convert bytes to a frame. Raises ProtocolError for what `pack` does not make; the message's fields are not checked yet."""
    try:
        header = json.loads(data)
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message header is not JSON: {error}") from error
    if not isinstance(header, dict) or header.keys() != {"kind", "seq", "nbytes", "fields"}:
        raise ProtocolError("a message header is not a JSON object with kind, seq, nbytes and fields")
    kind, fields = header["kind"], header["fields"]
    if not isinstance(kind, str) or kind not in KINDS or not isinstance(fields, dict):
        raise ProtocolError(f"unknown message {str(kind)[:80]!r}")
    if not all(is_number(header[name]) and isinstance(header[name], int) for name in ("seq", "nbytes")):
        raise ProtocolError(f"a message of {str(header['nbytes'])[:80]} bytes, at most {LARGEST:g}")
    return Frame(kind=kind, seq=header["seq"], nbytes=header["nbytes"], fields=fields, data=data)


def name_of(request: Request[Any]) -> str:
    """Return the name of a command for status and errors."""
    return re.sub(r"(?<=.)(?=[A-Z])", "_", type(request).__name__).lower()


def report_of(frame: Frame, rank: int) -> Report:
    """Return the report in a frame. Raises ProtocolError: there is none."""
    report = frame.message
    if not isinstance(report, Report):
        raise ProtocolError(f"rank {rank} sent a {frame.kind}, which is no report")
    return report


def all_of(kind: type[R], reports: Sequence[Report]) -> list[R]:
    """Return the reports of all ranks, all of one kind. Raises ProtocolError: one is not."""
    found = []
    for rank, report in enumerate(reports):
        if not isinstance(report, kind):
            raise ProtocolError(f"rank {rank} sent a {type(report).__name__} in place of a {kind.__name__}")
        found.append(report)
    return found
