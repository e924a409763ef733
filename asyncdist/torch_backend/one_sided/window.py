"""A `Window` by torch's names, as ``torch.distributed._new_window`` of torch 2.15 returns one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from asyncdist.groups import Group
from asyncdist.kernel import Work as StartedWork
from asyncdist.kernel import c10d_private
from asyncdist.torch_backend.torch_work import DONE, Work


class TorchWindow:
    """The window of a process group: the methods of torch's ``Window``, whose works can be awaited, too.

    Methods without ``async_op`` block. A put sends no signal of its own, which nccl2's does. torch's class cannot be made
    in Python, so that this one does not derive from it.
    """

    def __init__(self, group: Group, tensor: torch.Tensor | None) -> None:
        self._window = _result(group.new_window(tensor))

    def tensor_register(self, tensor: torch.Tensor, owning: bool = True) -> None:
        """Let the other ranks put into a tensor, which the window keeps. All ranks call it."""
        _result(self._window.tensor_register(tensor))

    def tensor_deregister(self) -> None:
        """Give up the tensor when the puts of all ranks have ended. All ranks call it."""
        _result(self._window.tensor_deregister())

    def put(
        self, tensor: torch.Tensor, dst_rank: int, target_offset_nelems: int, async_op: bool, opts: Any = None
    ) -> Work:
        """Write a tensor into that of a rank, from an element on: `asyncdist.Window.put`."""
        return _started(self._window.put(tensor, dst_rank, target_offset_nelems, timeout=_limit(opts)), async_op)

    def signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> Work:
        """Send a signal to a rank, after the puts there which this rank has started."""
        return _started(self._window.signal(peer_rank, timeout=_limit(opts)), async_op)

    def wait_signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> Work:
        """Wait for a signal of a rank. Each call takes one."""
        return _started(self._window.wait_signal(peer_rank, timeout=_limit(opts)), async_op)

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """Return the tensor of a rank of this host, without a copy."""
        found: torch.Tensor = _result(self._window.map_remote_tensor(rank))
        return found

    def get_attr(self, peer_rank: int) -> Any:
        """Return torch's ``WindowAttr``: the access is UNIFIED if `map_remote_tensor` works for the rank, else SEPARATE."""
        attributes, kinds = c10d_private.bindings.WindowAttr(), c10d_private.bindings.WindowAccessType
        attributes.access_type = kinds.UNIFIED if _result(self._window.is_mapped(peer_rank)) else kinds.SEPARATE
        return attributes


def _limit(opts: Any) -> timedelta | None:
    # torch's options have a negative timeout where the group's own applies.
    return None if opts is None or opts.timeout < timedelta(0) else opts.timeout


def _result(started: StartedWork) -> Any:
    started.wait()
    return started.result()


def _started(started: StartedWork, async_op: bool) -> Work:
    if async_op:
        return Work(started, [])
    _result(started)
    return DONE
