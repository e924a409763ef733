"""`torch.distributed.ProcessGroup` for groups that asyncdist serves as a whole.

torch's Python code calls the methods of these objects directly, and gets asyncdist's own `Work`, which can be awaited.
Code of torch that is written in C++ calls them through torch's own class.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_distributed

from asyncdist.base.callables import AnyFunction
from asyncdist.groups import Group, World
from asyncdist.kernel import OperationRecord, c10d_private, excluded_from_compile
from asyncdist.torch_backend.backend import Backend
from asyncdist.torch_backend.call_forms import FORMS
from asyncdist.torch_backend.torch_group import HAS_PYTHON_BACKENDS, NoGroupYet, TorchGroup

_torch: Any = torch_distributed.ProcessGroup
_CPU = torch.device("cpu")


# By the name of the function, without underscores.
_OP_TYPES = {name.replace("_", "").lower(): kind for name, kind in c10d_private.OpType.__members__.items()}
_OP_TYPES |= {
    "allgatherintotensor": _OP_TYPES["allgatherbase"],
    "reducescattertensor": _OP_TYPES["reducescatterbase"],
    "alltoallsingle": _OP_TYPES["alltoallbase"],
}


class WorkInfo(NamedTuple):
    """What a completion hook of torch learns of an operation. torch's class of this name cannot be made in Python."""

    op_type: Any
    seq: int
    time_started: datetime
    time_finished: datetime
    active_duration: timedelta

    @classmethod
    def of(cls, record: OperationRecord) -> WorkInfo:
        """Return the description of a completed operation."""
        kind = _OP_TYPES.get(record.op.replace("_", ""), c10d_private.OpType.UNKNOWN)
        duration, finished = timedelta(seconds=record.duration), datetime.now()
        return cls(kind, record.seq, finished - duration, finished, duration)


@excluded_from_compile
class ProcessGroup(TorchGroup, torch_distributed.ProcessGroup):
    """A `Group` as a process group of torch, made by ``init_process_group("asyncdist")`` and ``new_group``.

    From torch 2.14 on it also contains the group as a `Backend`.

    Args:
        group: The group.
        world: The world to close with this group; None if another group closes it.
        store: The group's store; not used below torch 2.14.
    """

    def __init__(self, group: Group | NoGroupYet, world: World | None, store: Any = None) -> None:
        self._serve(group, world, store)
        if HAS_PYTHON_BACKENDS:
            super().__init__(store, group.rank(), group.size())
            self.backend = Backend(group, None)
            self.backend._whole_of = weakref.ref(self)
            for device in _devices():
                self._register_backend(device, _torch.BackendType.CUSTOM, self.backend)
            self._set_default_backend(_torch.BackendType.CUSTOM)
        else:
            # The form with a store raises.
            super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
            self._torch_name = self._torch_description = ""

    def getRank(self) -> int:  # noqa: N802 - torch's name
        return self.group.rank()

    def getSize(self) -> int:  # noqa: N802 - torch's name
        return self.group.size()

    if not HAS_PYTHON_BACKENDS:
        # Later versions ask the back end for these values, or keep them.

        @property
        def _device_types(self) -> list[torch.device]:
            return _devices()

        def _get_backend(self, device: object) -> ProcessGroup:
            return self

        def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
            self._torch_name = name

        def getGroupName(self) -> str:  # noqa: N802 - torch's name
            return self._torch_name

        def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
            self._torch_description = description

        def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
            return self._torch_description

    # -- groups made of this one ---------------------------------------------------------------

    def split_group(self, new_ranks: list[int], *args: Any, **kwargs: Any) -> ProcessGroup | None:
        """Make a group of some ranks of this one, as torch's method does; None on the other ranks."""
        if self.group.rank() not in new_ranks:
            return None
        return self._like_this(_torch.split_group(self, new_ranks, *args, **kwargs))

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> ProcessGroup:
        """Make a group of the ranks of this one and of others, as torch's method does."""
        return self._like_this(_torch.merge_remote_group(self, *args, **kwargs))

    def _like_this(self, made: Any) -> ProcessGroup:
        """Return a group of this class for a group of torch's own that `Backend.split` or `Backend.merge` serves."""
        backend = made._get_backend(_CPU)
        group = type(self)(backend.group, backend._world, made.get_group_store())
        group._set_group_name(made.group_name)
        group._set_group_desc(made.group_desc)
        return group

    def _like(self, group: Group, world: World | None) -> ProcessGroup:
        return type(self)(group, world, self._shared)

    def _parts(self) -> tuple[TorchGroup, ...]:
        return (self, self.backend) if HAS_PYTHON_BACKENDS else (self,)

    # -- torch's hooks -------------------------------------------------------------------------

    def _register_on_completion_hook(self, hook: Callable[[WorkInfo], object]) -> None:
        """Call ``hook`` when an operation of this group has succeeded, on the thread that completes it."""
        self._hook(hook, on_end=lambda record: hook(WorkInfo.of(record)))

    def register_pre_hook(self, hook_id: int, hook: AnyFunction) -> None:
        """Call ``hook`` before each operation, as torch's method does."""
        _torch.register_pre_hook(self, hook_id, hook)
        self.__class__ = ObservedProcessGroup

    def register_post_hook(self, hook_id: int, hook: AnyFunction) -> None:
        """Call ``hook`` after each operation was started, as torch's method does."""
        _torch.register_post_hook(self, hook_id, hook)
        self.__class__ = ObservedProcessGroup


# Names that torch has deprecated and keeps. Programs call them, and C++ code of torch 2.14 and later does.
_OLDER_NAMES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
for _older, _present in _OLDER_NAMES.items():
    setattr(ProcessGroup, _older, getattr(ProcessGroup, _present))


class ObservedProcessGroup(ProcessGroup):
    """A process group whose operations torch's hooks see: its flight recorder, its check for NaN, and registered hooks.

    torch calls hooks in the operators of its dispatcher. Each method here therefore calls torch's own method, which
    calls the operator, which calls the `Backend`. A call takes a few microseconds more.
    """


def _through_dispatcher(name: str) -> AnyFunction:
    original = getattr(_torch, name)

    def call(self: ObservedProcessGroup, *args: Any, **kwargs: Any) -> Any:
        original(self, *args, **kwargs)
        # torch's handle of the operation cannot be awaited, and does not know whether the operation is complete.
        return vars(self.backend.started).pop("work")

    # By this name pybind11 sees that the replaced method is called from the one that replaces it.
    call.__code__ = call.__code__.replace(co_name=name)
    return call


if HAS_PYTHON_BACKENDS:
    for _name in (*FORMS.keys() - {"gather_single", "gather_into_tensor"}, "send", "recv", "recv_anysource"):
        setattr(ObservedProcessGroup, _name, _through_dispatcher(_name))
    # torch's own methods of both names call methods of the older ones.
    for _name in _OLDER_NAMES:
        setattr(ObservedProcessGroup, _name, getattr(_torch, _name))
    excluded_from_compile(ObservedProcessGroup)


def group_of(process_group: Any, device: torch.device = _CPU) -> Group | None:
    """Return the `Group` that serves a process group's tensors on a device; None if another back end serves them."""
    if not isinstance(process_group, TorchGroup) and torch.device(device.type) in process_group._device_types:
        process_group = process_group._get_backend(device)
    return process_group.group if isinstance(process_group, TorchGroup) else None


def _devices() -> list[torch.device]:
    types = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return [torch.device(each) for each in types]
