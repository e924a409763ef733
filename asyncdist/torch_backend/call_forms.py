"""The arguments of the methods of torch's process groups: `torch.distributed.ReduceOp`, and the forms of the calls.

torch's own code passes lists of tensors and an options object. Each method also has a short form, which torch's stub file
``torch/_C/_distributed_c10d.pyi`` declares: tensors, then root, reduction and timeout, by position or by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as torch_distributed

from asyncdist.base.callables import AnyFunction
from asyncdist.base.deadline import Timeout
from asyncdist.base.ops import ReduceOp, Reduction, premul_sum
from asyncdist.groups import Group
from asyncdist.kernel import DeviceWork, c10d_private
from asyncdist.kernel.engine import work as started

_TorchOp: Any = torch_distributed.ReduceOp

T = TypeVar("T")
Tensors = list[torch.Tensor]
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

_UNSET: Any = object()
_UNSET_TIMEOUT = timedelta(milliseconds=-1)


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


def _barrier(group: Group, opts: Any) -> tuple[Any, ...]:
    devices = getattr(opts, "device_ids", None) if torch.cuda.is_available() else None
    if not devices:
        return group.barrier, []
    on = group._on(torch.device("cuda", devices[0]))

    def barrier(background: bool = True, timeout: Timeout = None) -> started.Work:
        """Enter the barrier when the device has completed the current stream's work."""
        work = on.barrier(background=background, timeout=timeout)
        if not background:
            cast(DeviceWork, work).synchronize()
        return work

    return barrier, []


def _allreduce_coalesced(group: Group, tensors: Tensors, opts: Any) -> tuple[Any, ...]:
    op = reduction_of(opts.reduceOp)
    if len({tensor.dtype for tensor in tensors}) == 1:
        return group.all_reduce_coalesced, tensors, tensors, op
    return Together(group.all_reduce, [(tensor, op) for tensor in tensors]), tensors


def _gather(group: Group, outputs: list[Tensors], inputs: Tensors, opts: Any) -> tuple[Any, ...]:
    into = outputs[0] if outputs else None
    return group.gather, into or [], single(inputs), into, opts.rootRank


def _reduce_scatter_coalesced(group: Group, outputs: Tensors, inputs: Tensors, opts: Any) -> tuple[Any, ...]:
    op = reduction_of(opts.reduceOp)
    calls = [(output, tensor, op) for output, tensor in zip(outputs, inputs, strict=True)]
    return Together(group.reduce_scatter_single, calls), outputs


class Form(NamedTuple):
    """How a method of torch's process groups is called, and what it starts.

    Attributes:
        depths: Whether each tensor argument of the long form is a list of tensors (1) or of lists of tensors (2), or is
            passed on as it is (0).
        short: The options of the short form.
        start: Takes the group and the arguments of the long form. Returns the operation of the group, the tensors that it
            writes, and its arguments.
    """

    depths: tuple[int, ...]
    short: str
    start: Callable[..., tuple[Any, ...]]


FORMS = {
    "allreduce": Form((1,), "op timeout", lambda g, x, o: (g.all_reduce, x, single(x), reduction_of(o.reduceOp))),
    "allreduce_coalesced": Form((1,), "", _allreduce_coalesced),
    "broadcast": Form((1,), "root timeout", lambda g, x, o: (g.broadcast, x, single(x), o.rootRank)),
    "reduce": Form(
        (1,), "root op timeout", lambda g, x, o: (g.reduce, x, single(x), o.rootRank, reduction_of(o.reduceOp))
    ),
    "reduce_scatter": Form(
        (1, 2), "op timeout", lambda g, y, x, o: (g.reduce_scatter, y, single(y), single(x), reduction_of(o.reduceOp))
    ),
    "reduce_scatter_single": Form(
        (0, 0), "", lambda g, y, x, o: (g.reduce_scatter_single, [y], y, x, reduction_of(o.reduceOp))
    ),
    "reduce_scatter_single_coalesced": Form((1, 1), "", _reduce_scatter_coalesced),
    "allgather": Form((2, 1), "timeout", lambda g, y, x, o: (g.all_gather, single(y), single(y), single(x))),
    "allgather_coalesced": Form((0, 1), "", lambda g, y, x, o: (g.all_gather_coalesced, list(chain(*y)), y, x)),
    "all_gather_single": Form((0, 0), "", lambda g, y, x, o: (g.all_gather_single, [y], y, x)),
    "all_gather_single_coalesced": Form(
        (1, 1), "", lambda g, y, x, o: (Together(g.all_gather_single, list(zip(y, x, strict=True))), y)
    ),
    "gather": Form((2, 1), "root timeout", _gather),
    "gather_single": Form((0, 0), "", lambda g, y, x, o: (g.gather_single, [y], x, y, o.rootRank)),
    "scatter": Form(
        (1, 2), "root timeout", lambda g, y, x, o: (g.scatter, y, single(y), x[0] if x else None, o.rootRank)
    ),
    "alltoall": Form((1, 1), "timeout", lambda g, y, x, o: (g.all_to_all, y, y, x)),
    "all_to_all_single": Form(
        (0, 0, 0, 0), "timeout", lambda g, y, x, *rest: (g.all_to_all_single, [y], y, x, *rest[:2])
    ),
    "barrier": Form((), "timeout", _barrier),
}
# torch 2.15 has both names.
FORMS["gather_into_tensor"] = FORMS["gather_single"]
"""The collectives by torch's names. They take the group, tensors that are written or read (y, x), and the options."""

# The beginnings of the names of the tensor arguments, which differ between methods, forms and releases.
_NAMES = (("tensor", "output"), ("input",), ("output_split",), ("input_split",))


def collective(name: str) -> AnyFunction:
    """Return a method of `TorchGroup` that can be called in every form."""
    start = FORMS[name].start

    # The usual call has a list of tensors and the options. With them in a tuple it takes a third of a microsecond more.
    def call(self: Any, first: Any = _UNSET, second: Any = _UNSET, /, *others: Any, **named: Any) -> Any:
        if type(second) in _OPTIONS and not named:
            return self._run(second, start(self.group, first, second))
        arguments = tuple(each for each in (first, second, *others) if each is not _UNSET)
        if named or not arguments or type(arguments[-1]) not in _OPTIONS:
            arguments = _long_form(name, arguments, named)
        return self._run(arguments[-1], start(self.group, *arguments))

    call.__name__ = name
    return call


def _long_form(method: str, arguments: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call of any form as those of the long form.

    Raises:
        TypeError: An argument is missing, or is not one of the method.
    """
    depths, short = FORMS[method].depths, FORMS[method].short.split()
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
        return *tensors, options[0]
    values = dict(zip(short, options, strict=False))
    if len(options) > len(short) or not named.keys() <= set(short) - set(values):
        takes = ", ".join(short) or "opts"
        raise TypeError(f"{method}() takes {takes} after its tensors, not {[*options, *named]}")
    values |= named
    # A list of tensors alone is a call of the long form with its default options.
    if "root" in short and "root" not in values and (values or any(map(operator.is_not, tensors, given))):
        raise TypeError(f"{method}() needs its argument 'root', the rank of the root in the group")
    timeout = values.get("timeout")
    return *tensors, SimpleNamespace(
        asyncOp=True,
        timeout=_UNSET_TIMEOUT if timeout is None else timeout,
        reduceOp=values.get("op", _TorchOp(_TorchOp.SUM)),
        rootRank=values.get("root", 0),
    )


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
