"""What a program must give on each rank, computed by numpy without communication, and whether an outcome is that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.differences.programs import (
    GROUPS,
    STOOD_STILL,
    Collectives,
    Step,
    Tensor,
    Training,
    given,
    is_expanded,
    objects,
    splits,
)
from tests.differences.training import expected as expected_gradients

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Verdict:
    """How a contender did: ``kind`` is right, refused, unnamed, wrong, hung, or left out."""

    kind: str
    why: str = ""


RIGHT = Verdict("right")
LEFT_OUT = Verdict("left out")


class Undefined(Exception):
    """A step has no result: it must be refused by name."""


@dataclass(frozen=True)
class Numbers:
    """The numbers of a tensor, how far results may be from them, and where they may be anything."""

    array: Array
    tolerance: Array | float = 0.0
    free: Array | bool = False


# -- collectives ----------------------------------------------------------------------------------------


def expected(step: Step, group: str, rank: int) -> list[Numbers] | list[Any] | None:
    """Return the results of a step on a rank of the group, one by one. Raises Undefined."""
    ranks, plan = GROUPS[group], step.tensor
    size, me = len(ranks), ranks.index(rank)
    root = step.root % size
    _check_targets(step, is_target=size > 1 and (step.call != "reduce" or me == root))
    sent = [[_seen(*each) for each in given(step, size, place, peer)] for place, peer in enumerate(ranks)]
    own = [each[0] for each in sent]
    match step.call:
        case "barrier":
            return None
        case "all_reduce":
            return [reduced(own, step.op, plan)]
        case "reduce":
            return [reduced(own, step.op, plan) if me == root else Numbers(own[me])]
        case "broadcast":
            return [Numbers(own[root])]
        case "all_gather":
            return [Numbers(each) for each in own]
        case "all_gather_into_tensor":
            return [Numbers(np.concatenate(own))]
        case "gather":
            return [Numbers(each) for each in own] if me == root else []
        case "reduce_scatter":
            return [reduced([parts[me] for parts in sent], step.op, plan)]
        case "reduce_scatter_tensor":
            return [reduced([np.split(whole, size)[me] for whole in own], step.op, plan)]
        case "scatter":
            return [Numbers(sent[root][me])]
        case "all_to_all":
            return [Numbers(parts[me]) for parts in sent]
        case "all_to_all_single":
            counts = splits(step, size)
            begins = [int(row[:me].sum()) for row in counts]
            parts = [each[at : at + int(row[me])] for each, at, row in zip(own, begins, counts, strict=True)]
            return [Numbers(np.concatenate(parts))]
        case "ring":
            return [Numbers(own[(me - 1) % size])]
        case "all_gather_object":
            return [objects(step, peer)[:size] for peer in ranks]
        case "broadcast_object_list":
            return objects(step, ranks[root])[:size]
        case "gather_object":
            return [objects(step, peer)[:size] for peer in ranks] if me == root else None
        case "scatter_object_list":
            return [objects(step, ranks[root])[me]]
    raise AssertionError(step.call)


def _check_targets(step: Step, *, is_target: bool) -> None:
    """Refuse outputs whose elements share memory."""
    plan = step.tensor
    if step.call in ("all_reduce", "reduce", "broadcast"):
        shared = is_target and plan.layout == "expanded"
    elif (
        step.call in ("all_gather_into_tensor", "all_to_all_single") or "object" in step.call or step.call == "barrier"
    ):
        return
    else:
        shared = step.output == "expanded"
    if shared and plan.shape and plan.shape[0] > 1 and 0 not in plan.shape:
        raise Undefined


def _seen(plan: Tensor, values: torch.Tensor) -> Array:
    """Return what the calls read: an expanded tensor shows its first row everywhere."""
    return wide(values[:1].expand(values.shape) if is_expanded(plan) else values)


def wide(tensor: torch.Tensor) -> Array:
    """Return the values of a tensor in a type of numpy that has all of them."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128).numpy()
    if tensor.dtype.is_floating_point:
        return (tensor.float() if tensor.dtype.itemsize == 1 else tensor).double().numpy()
    return tensor.numpy()


_WHOLE = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum,
          "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}  # fmt: skip
_TRUTH = {"SUM": np.logical_or, "PRODUCT": np.logical_and, "MIN": np.logical_and, "MAX": np.logical_or,
          "BAND": np.logical_and, "BOR": np.logical_or, "BXOR": np.logical_xor}  # fmt: skip


def reduced(arrays: list[Array], op: str, plan: Tensor) -> Numbers:
    """Return the reduction of the numbers of all ranks, and how far any order of rounded operations may be from it."""
    dtype, size = plan.torch_dtype, len(arrays)
    with np.errstate(all="ignore"):
        if dtype is torch.bool:
            if op == "AVG":
                raise Undefined
            return Numbers(_fold(_TRUTH[op], arrays))
        if not (dtype.is_floating_point or dtype.is_complex):
            if op == "AVG":
                total = _fold(np.add, arrays)
                quotients = [abs(int(each)) // size * (1 if each > 0 else -1) for each in total.flat]
                return Numbers(np.array(quotients, dtype=total.dtype).reshape(total.shape))
            return Numbers(_fold(_WHOLE[op], arrays))
        if op.startswith("B") or (dtype.is_complex and op in ("MIN", "MAX")):
            raise Undefined
        if op in ("MIN", "MAX"):
            return Numbers(_fold(_WHOLE[op], arrays))
        return _rounded(arrays, op, dtype)


def _rounded(arrays: list[Array], op: str, dtype: torch.dtype) -> Numbers:
    size, limits = len(arrays), torch.finfo(dtype)
    wide_type = np.clongdouble if dtype.is_complex else np.longdouble
    exact = [each.astype(wide_type) for each in arrays]
    if op == "PRODUCT":
        result, scale = _fold(np.multiply, exact), _fold(np.multiply, [abs(each) for each in exact])
    else:
        result, scale = _fold(np.add, exact), _fold(np.add, [abs(each) for each in exact])
        if op == "AVG":
            result, scale = result / size, scale / size
    # What is not finite, or overflows on the way, depends on the order; a narrow type may also hold its largest value.
    finite = np.isfinite(scale)
    over = finite & (scale * size > float(limits.max) * (1 - float(limits.eps)))
    # An average is a sum of float32 or float64, divided.
    within = torch.finfo(torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32)
    free = over & (op != "AVG") | finite & (scale * size > float(within.max) * (1 - float(limits.eps)))
    if dtype.is_complex or (dtype.itemsize == 1 and "fnuz" in str(dtype)):
        free = free | ~finite
    tolerance = float(limits.eps) * (size + 1) * np.where(finite, scale, 0) + float(limits.tiny)
    narrow = np.complex128 if dtype.is_complex else np.float64
    return Numbers(result.astype(narrow), tolerance.astype(np.float64), free)


def _fold(function: Any, arrays: list[Array]) -> Array:
    result = arrays[0]
    for each in arrays[1:]:
        result = function(result, each)
    return result


# -- judging --------------------------------------------------------------------------------------------


def judge(program: Any, outcomes: list[Any], *, strict: bool = True) -> Verdict:
    """Return how a contender did, by the outcomes of all ranks; ``strict`` looks at version counters, too."""
    verdicts = [RIGHT]
    for rank, outcome in enumerate(outcomes):
        if isinstance(program, Training):
            verdicts.append(_judge_training(program, rank, outcome))
        else:
            steps = program.steps if rank in GROUPS[program.group] else ()
            verdicts += [
                _judge_step(program, step, rank, each, strict) for step, each in zip(steps, outcome, strict=True)
            ]
    return min(verdicts, key=lambda verdict: _ORDER.index(verdict.kind))


def is_together(program: Any, outcomes: list[Any]) -> bool:
    """Return whether all ranks are at the same collective afterwards: a step has raised on all of them, or on none."""
    if isinstance(program, Training):
        return all(outcome[0] == "returned" for outcome in outcomes)
    taking_part = [outcomes[rank] for rank in GROUPS[program.group]]
    return all(len({outcome[0] for outcome in step}) == 1 for step in zip(*taking_part, strict=True)) and not any(
        word in outcome[2] for each in taking_part for outcome in each if outcome[0] == "raised" for word in _BROKEN
    )


_BROKEN = ("onnection", "imed out", "imeout")
_ORDER = ("wrong", "unnamed", "refused", "right")


def _judge_step(program: Collectives, step: Step, rank: int, outcome: tuple[Any, ...], strict: bool) -> Verdict:
    where = f"{step.call} {step.op if step.call in _REDUCING else ''} on rank {rank}: "
    kind, *rest = outcome
    if kind == "raised":
        name, text, is_named = rest
        return Verdict("refused" if is_named else "unnamed", f"{where}{name}: {text}")
    results, faults = rest
    try:
        due = expected(step, program.group, rank)
    except Undefined:
        return Verdict("wrong", where + "returned, although it has no result")
    if "object" in step.call or due is None:
        return (
            RIGHT
            if results == (due if "object" in step.call else [])
            else Verdict("wrong", f"{where}{results} for {due}")
        )
    assert due is not None
    for result, numbers in zip(results, due, strict=True):
        dtype, shape, raw = result
        found = (
            torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype))
            if raw
            else torch.empty(0, dtype=getattr(torch, dtype))
        )
        why = _difference(wide(found.reshape(shape)), numbers)
        if why:
            return Verdict("wrong", where + why)
    faults = [fault for fault in faults if strict or fault != STOOD_STILL]
    return Verdict("wrong", where + faults[0]) if faults else RIGHT


_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")


def _difference(found: Array, due: Numbers) -> str:
    if found.shape != due.array.shape:
        return f"shape {found.shape} for {due.array.shape}"
    with np.errstate(all="ignore"):
        same = (
            (found == due.array) | (np.isnan(found) & np.isnan(due.array))
            if found.dtype.kind in "fc"
            else found == due.array
        )
        close = abs(found - due.array) <= due.tolerance if found.dtype.kind in "fc" else same
        wrong = np.flatnonzero(~(same | close | due.free))
    if not wrong.size:
        return ""
    place = int(wrong[0])
    return f"{wrong.size} of {found.size} elements, the first {found.flat[place]} for {due.array.flat[place]}"


def _judge_training(program: Training, rank: int, outcome: tuple[Any, ...]) -> Verdict:
    kind, *rest = outcome
    if kind == "raised":
        name, text, is_named = rest
        return Verdict("refused" if is_named else "unnamed", f"on rank {rank}: {name}: {text}")
    for number, (found, due) in enumerate(zip(rest[0], expected_gradients(program, rank), strict=True)):
        for place, (ours, theirs) in enumerate(zip(found, due, strict=True)):
            if (ours is None) is not (theirs is None):
                return Verdict(
                    "wrong", f"on rank {rank}: gradient {place} after backward {number} is {ours} for {theirs}"
                )
            if ours is not None and not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5):
                return Verdict("wrong", f"on rank {rank}: gradient {place} after backward {number} is another")
    return RIGHT
