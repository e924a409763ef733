"""Describes a call, and the difference between the calls of two ranks, from their fingerprints."""

from __future__ import annotations

from asyncdist.base.ops import PREPARES, Collective, ReduceOp
from asyncdist.kernel.memory.buffers import DTYPES
from asyncdist.kernel.transport.wire_format import Fingerprint


def describe_call(call: Fingerprint, rank: int, other_call: Fingerprint, peer: int) -> str:
    """Return one clause: the calls of two ranks, and the fields in which they differ."""
    own, other, differences = call_in_words(call), call_in_words(other_call), call.differences(other_call)
    if not call.collective:
        return f"rank {peer} called {other} where rank {rank} called something else, long ago"
    if differences == ["shape"]:
        or_form = (
            ", or one with a list and the other with one tensor" if call.collective == Collective.all_gather else ""
        )
        return f"rank {rank} and rank {peer} called {own} on tensors of different shapes{or_form}"
    # Both ends of a message have the fingerprint of a send, and the receiver compares.
    if call.collective == other_call.collective == Collective.send:
        own = call_in_words(call, "recv")
    return f"rank {rank} called {own} while rank {peer} called {other} (different {', '.join(differences)})"


def call_in_words(call: Fingerprint, name: str = "") -> str:
    """Return a call in source form, under ``name`` if given: ``all_reduce(8 x float32, SUM)``."""
    if not name:
        prepares = call.collective > PREPARES
        name = _member(Collective, call.collective - PREPARES * prepares) + "_init" * prepares
    details = []
    if call.dtype:
        dtype = str(DTYPES.get(call.dtype, f"dtype {call.dtype}")).removeprefix("torch.")
        details.append(f"{call.count} x {dtype}")
    elif call.collective == Collective.send:
        details.append("objects")
    if call.reduction:
        details.append(_member(ReduceOp, call.reduction))
    if call.root:
        details.append(f"root {call.root - 1}")
    return f"{name}({', '.join(details)})"


def _member(kind: type[Collective] | type[ReduceOp], number: int) -> str:
    try:
        return kind(number).name
    except ValueError:
        return f"unknown ({number})"
