"""The records of a file store's log: our frames, with the member in front."""

from __future__ import annotations

from typing import Any, NamedTuple

from asyncdist.errors import ProtocolError, UsageError
from asyncdist.store.messages import Encoder, decode_fields, decode_operation
from asyncdist.store.operations import Op

MAGIC = b"asyncdist store log 1\n"


class Record(NamedTuple):
    """One request of one member: what `StoreState.execute` takes."""

    member: tuple[str, ...]
    request: int
    op: Op
    args: tuple[Any, ...]


def encode_record(record: Record) -> bytes:
    """Return a record's frame. Raises UsageError for what cannot be written."""
    try:
        return Encoder().frame(record.member, record.request, record.op, *record.args)
    except ValueError as error:
        raise UsageError(f"store {record.op.name.lower()}: {error}") from None


def decode_record(frame: bytes) -> Record:
    """Return the record in a frame; raises ProtocolError."""
    member, *request = decode_fields(frame) or [None]
    if type(member) is not list or not all(type(part) is str for part in member):
        raise ProtocolError("a record that names no member")
    return Record(tuple(member), *decode_operation(request))
