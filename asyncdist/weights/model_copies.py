"""The copies of a subscriber's model: requests read one, while the next version is put into another.

A copy is a module like the subscriber's, or a dict of tensors. It shows a version by referring to the memory in which
the version has arrived, without copying it. Tensors that cannot refer to it, because they are on a device, have another
dtype, or are parts that do not lie together, have memory of their own in each copy, into which threads copy the
version.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from asyncdist.base.callables import Callback
from asyncdist.errors import UsageError
from asyncdist.weights.content.selection import Selection
from asyncdist.weights.errors import WeightsError
from asyncdist.weights.publisher import Source, tensors_of
from asyncdist.weights.transfer.held_version import HeldVersion
from asyncdist.weights.transfer.version_table import Version

_PIECE_NBYTES = 4 << 20
"""Bytes that a thread copies at a time into a copy's own memory."""


class ModelCopy:
    """One copy.

    Attributes:
        model: The module, or the dict of tensors. Its tensors are empty until it shows a version.
        held: The version that it shows; None if it shows nothing.
        num_readers: The number of requests that read it.
    """

    def __init__(self, like: Source | None) -> None:
        self.model: Any = {}
        self._targets: dict[str, torch.Tensor] = {}
        if like is not None:
            self.model, self._targets = _empty_copy(like)
        self._takes_all = like is None
        self.held: HeldVersion | None = None
        self.num_readers = 0
        self._own: dict[str, torch.Tensor] = {}

    @property
    def version(self) -> Version:
        assert self.held is not None
        return self.held.version

    def show(self, held: HeldVersion, selection: Selection) -> None:
        """Show a version from now on. Called in a thread, while no request reads this copy.

        Raises:
            UsageError: The program has replaced a tensor of the copy.
        """
        if isinstance(self.model, nn.Module):
            _refuse_replaced(self.model, self._targets)
        if self._takes_all:
            self.model.clear()
            self._targets = {
                name: torch.empty(0, dtype=place.dtype, device="cpu") for name, place in selection.layout.places.items()
            }
        for name in selection.parts:
            part = held.part(selection, name)
            target = self._targets[name]
            if target.is_cpu and target.dtype == part.dtype and part.is_contiguous():
                self._own.pop(name, None)
                self._set(name, part)
                continue
            own = self._own.get(name)
            if own is None or own.shape != part.shape:
                own = self._own[name] = torch.empty(part.shape, dtype=target.dtype, device=target.device)
            _copy_in_pieces(own, part)
            self._set(name, own)
        for device in {own.device for own in self._own.values() if own.is_cuda}:
            torch.cuda.synchronize(device)
        self.held = held

    def hide(self) -> HeldVersion | None:
        """Refer to the memory of the version no more, and return the version."""
        held, self.held = self.held, None
        for name, target in self._targets.items():
            if name not in self._own:
                self._set(name, torch.empty(0, dtype=target.dtype, device=target.device))
        return held

    def _set(self, name: str, tensor: torch.Tensor) -> None:
        if isinstance(self.model, nn.Module):
            self._targets[name].data = tensor
        else:
            self.model[name] = self._targets[name] = tensor


class ModelCopies:
    """The copies of a subscriber. Any thread may begin and end to read; the other methods belong to one thread.

    They are copies of ``like``; None stands for dicts of all tensors that are published. Any thread calls ``on_drained``
    when the last request of a version that is not the current one has ended.
    """

    def __init__(self, like: Source | None, count: int, on_drained: Callback) -> None:
        self._copies = [ModelCopy(like) for _ in range(count)]
        if isinstance(like, nn.Module):
            owned = [{id(target) for target in each._targets.values()} for each in self._copies]
            if len(set().union(*owned)) < sum(map(len, owned)):
                raise UsageError(
                    "copies of the model share tensors, because a module has a __deepcopy__ of its own: let it copy them, "
                    "or pass a dict of tensors as like="
                )
        self._on_drained = on_drained
        self._lock = threading.Lock()
        self._current: ModelCopy | None = None

    @property
    def current(self) -> Version | None:
        """The version that new requests read; None before the first."""
        with self._lock:
            return None if self._current is None else self._current.version

    def begin_reading(self) -> ModelCopy:
        """Return the current copy, which stays unchanged until `end_reading`. Raises WeightsError before the first."""
        with self._lock:
            if self._current is None:
                raise WeightsError(
                    "no version is in use yet: swap the first one in before requests are served (async for version in "
                    "subscriber: async with subscriber.swap(version): ...)"
                )
            self._current.num_readers += 1
            return self._current

    def end_reading(self, read: ModelCopy) -> None:
        with self._lock:
            read.num_readers -= 1
            is_drained = not read.num_readers and read is not self._current
        if is_drained:
            self._on_drained()

    @property
    def spare(self) -> ModelCopy | None:
        """A copy that shows nothing; None if every copy shows a version."""
        with self._lock:
            return next((each for each in self._copies if each.held is None and not each.num_readers), None)

    def hide_drained(self) -> list[HeldVersion]:
        """Hide the copies that are not current and that no request reads, and return their versions."""
        with self._lock:
            drained = [
                each for each in self._copies if each is not self._current and not each.num_readers and each.held
            ]
        return [held for each in drained if (held := each.hide()) is not None]

    def reserve(self, spare: ModelCopy) -> None:
        """Keep a copy from being hidden until `end_reading`."""
        with self._lock:
            spare.num_readers += 1

    def make_current(self, shown: ModelCopy) -> None:
        with self._lock:
            self._current = shown


def _copy_in_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor in pieces, between which another thread may hold the interpreter."""
    rows = max(1, _PIECE_NBYTES // max(1, source[0].nbytes)) if source.dim() else 1
    if source.dim() == 0 or source.shape[0] <= rows:
        target.copy_(source)
        return
    for start in range(0, source.shape[0], rows):
        target[start : start + rows].copy_(source[start : start + rows], non_blocking=True)


def _empty_copy(like: Source) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a copy whose tensors have no elements, and these tensors by name. A meta tensor becomes one of the CPU."""
    tensors = tensors_of(like)

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=tensor.dtype, device="cpu" if tensor.is_meta else tensor.device)

    if not isinstance(like, nn.Module):
        targets = {name: empty(tensor) for name, tensor in tensors.items()}
        return dict(targets), targets
    persistent = _tensors_of_module(like, tensors)
    memo: dict[int, Any] = {}
    for original in persistent.values():
        replacement = empty(original)
        if isinstance(original, nn.Parameter):
            replacement = nn.Parameter(replacement, requires_grad=False)
        memo[id(original)] = replacement
    for name, tensor in _named_tensors(like):
        if tensor.is_meta and id(tensor) not in memo:
            raise UsageError(
                f"{name} is on the meta device and not in the state dict of the model, so no version gives it values: "
                "compute it on the CPU before the model is passed as like=, or register the buffer as persistent"
            )
    # Outside of autograd, which would record how TorchScript copies its tensors.
    with torch.no_grad():
        model = copy.deepcopy(like, memo)
    # Not those in `memo`: TorchScript, and modules with a __deepcopy__ of their own, do not use them.
    targets = _tensors_of_module(model, persistent)
    for name, target in targets.items():
        if target is not memo[id(persistent[name])]:
            if target is persistent[name] or target.is_meta:
                raise UsageError(
                    f"copy.deepcopy of the model does not copy {name}: change the __deepcopy__ of its module, or pass a "
                    "dict of tensors as like="
                )
            target.requires_grad_(False).data = empty(target)
    return model, targets


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return all parameters and buffers of a module, those that are tied by each name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _refuse_replaced(model: nn.Module, targets: Mapping[str, torch.Tensor]) -> None:
    """Raise UsageError if a name of a copy leads to another tensor than that in which versions are shown."""
    present = dict(_named_tensors(model))
    replaced = [name for name, target in targets.items() if present.get(name) is not target]
    if replaced:
        raise UsageError(
            f"the program has replaced {replaced[0]} of a copy, which would keep its values: change the values of "
            "a copy in place, and the module itself before it is passed as like="
        )


def _tensors_of_module(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module by the names of its state dict."""
    own = dict(_named_tensors(model))
    strange = [name for name in names if name not in own]
    if strange:
        raise UsageError(
            f"{strange[0]} is in the state dict of the model, but no parameter or buffer has this name: pass a dict of "
            "tensors as like="
        )
    return {name: own[name] for name in names}
