"""The state of a training job, and its transfer to members that lack it. Exported by `asyncdist`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncdist.errors import GroupError, UsageError

Members = Any
"""A `Group`, whose module imports this one."""

_LARGE_NBYTES = 1 << 16
"""Tensors from this size on are broadcast one by one, into the memory of the receiver if it fits. Smaller ones travel with
the plain values."""

Path = tuple[Any, ...]
Layout = list[tuple[Path, tuple[int, ...], str, str]]
"""Path, shape, dtype and device type of each large tensor, in the order of their transfer."""


class State:
    """What a job keeps while its members change: models, optimizers, and plain values such as the number of the step.

    Each keyword becomes an attribute. An object with ``state_dict`` and ``load_state_dict`` keeps its identity, and a
    transfer loads its content. Any other value is replaced, and must be plain data: numbers, texts, tensors on the CPU,
    and lists and dicts of these.

    Args:
        step: The number of committed steps. A member with the highest number passes its state on.
        parts: The objects and values.

    Example:
        >>> state = State(model=torch.nn.Linear(4, 1), epoch=0)
        >>> state.step, state.epoch
        (0, 0)
    """

    step: int

    def __init__(self, *, step: int = 0, **parts: Any) -> None:
        self.__dict__.update(parts, step=step)
        self._history = ""
        """Equal on members whose states have the same beginning; empty before the first `adopt`."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the state has no part {name!r}: pass {name}=... when you make it")

    @property
    def is_shared(self) -> bool:
        """Whether this state has been passed on or received, so that it has the history of the job."""
        return bool(self._history)

    def parts(self) -> dict[str, Any]:
        """Return the objects and values by name, including ``step``."""
        return {name: part for name, part in self.__dict__.items() if not name.startswith("_")}


async def adopt(group: Members, state: State) -> bool:
    """Pass the state on as `Group.adopt` says; return whether this member has received it."""
    try:
        return await _pass_on(group, state)
    except GroupError:
        group.changed = True
        return False


async def _pass_on(group: Members, state: State) -> bool:
    versions: list[Any] = [None] * group.size()
    await group.all_gather_object(versions, [state._history, state.step, sorted(state.parts())])
    source = max(range(len(versions)), key=lambda rank: (bool(versions[rank][0]), versions[rank][1], -rank))
    for rank, (_, _, names) in enumerate(versions):
        if names != versions[source][2]:
            raise UsageError(
                f"rank {rank} has a state with the parts {', '.join(names)}, but rank {source} one with "
                f"{', '.join(versions[source][2])}: make the state of equal parts on all members"
            )
    receivers = [
        rank for rank, version in enumerate(versions) if rank != source and version[:2] != versions[source][:2]
    ]
    if not versions[source][0]:
        receivers = [rank for rank in range(len(versions)) if rank != source]
        if group.rank() == source:
            state._history = secrets.token_hex(8)
    if not receivers or group.rank() not in (source, *receivers):
        return False
    part = group if len(receivers) + 1 == len(versions) else _part(group, [source, *receivers])
    sender = 0 if part is not group else source
    try:
        if group.rank() == source:
            await _send(part, sender, state)
        else:
            await _receive(part, sender, state)
    finally:
        if part is not group:
            part.close()
    return bool(group.rank() != source)


def _part(group: Members, members: Sequence[int]) -> Members:
    part = group.new_group(members, group_desc=f"{group.name} (its newcomers)", sort_ranks=False)
    # A member that has not seen the versions of all before the group failed does not come.
    group.endpoint.progress.submit(lambda: group.endpoint.failures.follow(part.channel, group.channel))
    return part


async def _send(group: Members, sender: int, state: State) -> None:
    large: list[torch.Tensor] = []
    layout: Layout = []
    values = {}
    for name, part in state.parts().items():
        content = part.state_dict() if _is_loadable(part) else part
        values[name] = _mapped(content, (name,), lambda path, value: _reserve(path, value, layout, large))
    try:
        await group.broadcast_object_list([state._history, values, layout], sender, weights_only=True)
    except UsageError as error:
        plain = {name: part for name, part in state.parts().items() if not _is_loadable(part)}
        kinds = ", ".join(f"{name} ({type(part).__qualname__})" for name, part in plain.items())
        raise UsageError(
            f"the state cannot be passed on: {error.summary}; parts without state_dict and load_state_dict must be plain "
            f"data, and are {kinds}"
        ) from error
    for tensor in large:
        await group.broadcast(tensor, sender)


def _reserve(path: Path, value: Any, layout: Layout, large: list[torch.Tensor]) -> Any:
    """Note a large tensor, and return None in its place; return any other value."""
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach()
    if tensor.device.type == "cpu" and tensor.nbytes < _LARGE_NBYTES:
        return tensor
    layout.append((path, *_kind_of(tensor)))
    large.append(tensor.contiguous())
    return None


async def _receive(group: Members, sender: int, state: State) -> None:
    head: list[Any] = [None] * 3
    await group.broadcast_object_list(head, sender, weights_only=True)
    history, values, layout = head
    state._history = ""  # until everything has arrived
    own: dict[Path, Any] = {}
    for name, part in state.parts().items():
        if _is_loadable(part):
            _mapped(part.state_dict(), (name,), own.setdefault)
    received: dict[Path, torch.Tensor] = {}
    for entry, shape, dtype, device in layout:
        path = tuple(entry)
        target: Any = own.get(path)
        fits = isinstance(target, torch.Tensor) and _kind_of(target) == (tuple(shape), dtype, device)
        if not (fits and target.is_contiguous()):
            target = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        received[path] = target.detach()
        await group.broadcast(received[path], sender)
    for name, value in values.items():
        part = getattr(state, name)
        content = _mapped(value, (name,), received.get)
        if _is_loadable(part):
            part.load_state_dict(content)
        else:
            setattr(state, name, content)
    state._history = history


def _kind_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], str, str]:
    """Return the shape, dtype and device type of a tensor, as in `Layout`."""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.device.type


def _is_loadable(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def _mapped(value: Any, path: Path, function: Callable[[Path, Any], Any]) -> Any:
    """Return nested dicts, lists and tuples with each other value in them replaced by ``function(path, value)``."""
    if isinstance(value, dict):
        return {key: _mapped(part, (*path, key), function) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(part, (*path, key), function) for key, part in enumerate(value))
    return function(path, value)
