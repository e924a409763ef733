"""The arguments of the methods of torch's process groups: `torch.distributed.ReduceOp`, and the forms of the calls.

torch's own code passes lists of tensors and an options object. Each method also has a short form, which torch's stub file
``torch/_C/_distributed_c10d.pyi`` declares: tensors, then root, reduction and timeout, by position or by name.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as torch_distributed

from asyncdist.base.deadline import Timeout
from asyncdist.base.ops import ReduceOp, Reduction, premul_sum
from asyncdist.groups import Group
from asyncdist.kernel import c10d_private
from asyncdist.kernel.engine import work as started

_TorchOp: Any = torch_distributed.ReduceOp

T = TypeVar("T")
Start = Callable[..., started.Work]
"""Starts an operation of a group: one of its methods, or `Together`."""

# By hash, which is the operation's number: reading the name of torch's objects, or comparing them, takes a microsecond.
_BY_HASH: dict[int, ReduceOp] = {
    hash(_TorchOp(getattr(_TorchOp, op.name))): op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM
}


def reduction_of(torch_op: Any) -> Reduction:
    """Return the reduction for one of torch's; an unknown one is returned unchanged, and the operation refuses it."""
    op = _BY_HASH.get(hash(torch_op))
    if op is not None:
        return op
    kind, factor = torch_op.__getstate__() if hasattr(torch_op, "__getstate__") else (torch_op, None)
    if kind == _TorchOp.PREMUL_SUM and factor is not None:
        return premul_sum(float(factor))
    return cast(Reduction, torch_op)


# The types of options objects.
_OPTIONS = frozenset(
    [SimpleNamespace, *(each for name, each in vars(c10d_private.bindings).items() if name.endswith("Options"))]
)

_UNSET_TIMEOUT = timedelta(milliseconds=-1)

# By method: whether each tensor argument of the long form is a list of tensors (1) or of lists of tensors (2), or is passed
# on as it is (0); and the options of the short form.
_FORMS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "allreduce": ((1,), ("op", "timeout")),
    "allreduce_coalesced": ((1,), ()),
    "broadcast": ((1,), ("root", "timeout")),
    "reduce": ((1,), ("root", "op", "timeout")),
    "reduce_scatter": ((1, 2), ("op", "timeout")),
    "reduce_scatter_single": ((0, 0), ()),
    "reduce_scatter_single_coalesced": ((1, 1), ()),
    "allgather": ((2, 1), ("timeout",)),
    "allgather_coalesced": ((0, 1), ()),
    "all_gather_single": ((0, 0), ()),
    "all_gather_single_coalesced": ((1, 1), ()),
    "gather": ((2, 1), ("root", "timeout")),
    "gather_single": ((0, 0), ()),
    "scatter": ((1, 2), ("root", "timeout")),
    "alltoall": ((1, 1), ("timeout",)),
    "all_to_all_single": ((0, 0, 0, 0), ("timeout",)),
    "barrier": ((), ("timeout",)),
}
# The beginnings of the names of the tensor arguments, which differ between methods, forms and releases.
_NAMES = (("tensor", "output"), ("input",), ("output_split",), ("input_split",))


def any_form(method: Callable[..., T]) -> Callable[..., T]:
    """Let a method that takes the long form, by position, be called in every form."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> T:
        if not named and arguments and type(arguments[-1]) in _OPTIONS:
            return method(self, *arguments)
        if len(named) == 1 and type(named.get("opts")) in _OPTIONS:
            return method(self, *arguments, **named)
        return method(self, *_long_form(name, arguments, named))

    return call


def _long_form(method: str, arguments: Sequence[Any], named: dict[str, Any]) -> list[Any]:
    """Return the arguments of a call of any form as those of the long form.

    Raises:
        TypeError: An argument is missing, or is not one of the method.
    """
    depths, short = _FORMS[method]
    given = [
        arguments[place] if place < len(arguments) else _named(method, place, named) for place in range(len(depths))
    ]
    tensors = [_nested(value, depth) for value, depth in zip(given, depths, strict=True)]
    options = arguments[len(depths) :]
    if "opts" in named and not options:
        options = (named.pop("opts"),)
    if not named and options == (None,):
        # Some declarations admit None for the options object.
        options = ()
    if len(options) == 1 and type(options[0]) in _OPTIONS and not named:
        return [*tensors, options[0]]
    values = dict(zip(short, options, strict=False))
    if len(options) > len(short) or not named.keys() <= set(short) - set(values):
        takes = ", ".join(short) or "opts"
        raise TypeError(f"{method}() takes {takes} after its tensors, not {[*options, *named]}")
    values |= named
    # A list of tensors alone is a call of the long form with its default options.
    if "root" in short and "root" not in values and (values or any(map(operator.is_not, tensors, given))):
        raise TypeError(f"{method}() needs its argument 'root', the rank of the root in the group")
    timeout = values.get("timeout")
    return [
        *tensors,
        SimpleNamespace(
            asyncOp=True,
            timeout=_UNSET_TIMEOUT if timeout is None else timeout,
            reduceOp=values.get("op", _TorchOp(_TorchOp.SUM)),
            rootRank=values.get("root", 0),
        ),
    ]


def _named(method: str, place: int, named: dict[str, Any]) -> Any:
    """Remove a tensor argument from the named ones, and return it."""
    for name in named:
        if name.startswith(_NAMES[place]) and ("split" in name) == (place > 1):
            return named.pop(name)
    raise TypeError(f"{method}() needs a further tensor argument: {' or '.join(_NAMES[place])}")


def _nested(value: Any, depth: int) -> Any:
    if depth and isinstance(value, torch.Tensor):
        return [value]
    if depth == 2 and value and isinstance(value[0], torch.Tensor):
        return [value]
    return value


def single(items: Sequence[T]) -> T:
    """Return the only item; otherwise the list itself, which the operation refuses with its own error."""
    return items[0] if len(items) == 1 else cast(T, items)


def method_of(group: Group, method: Start) -> Start:
    """Return another group's method for a method of a group; for another function the function itself."""
    return getattr(group, method.__name__) if isinstance(getattr(method, "__self__", None), Group) else method


class Together:
    """Starts several operations by one method of a group, and returns one Work for all of them."""

    def __init__(self, start: Start, calls: Sequence[tuple[Any, ...]]) -> None:
        self.start, self.calls = start, calls

    def __call__(self, background: bool = True, timeout: Timeout = None) -> started.Work:
        return started.joined([self.start(*call, background=background, timeout=timeout) for call in self.calls])
