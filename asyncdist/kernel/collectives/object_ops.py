"""The operations on Python objects of a `Group`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Unpack

from asyncdist.kernel.collectives import p2p
from asyncdist.kernel.collectives.collective_ops import CallOptions
from asyncdist.kernel.engine.operation import PlanOf
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.memory.torch_compile import excluded_from_compile


@excluded_from_compile
class ObjectOps(ABC):
    """The operations that send Python objects among an ordered set of ranks.

    Each starts an operation and returns its `Work`. With ``weights_only``, given on every rank, objects are restricted to
    what torch.load(weights_only=True) reads. They are then never pickled, even if ASYNCDIST_ALLOW_PICKLE allows pickles.
    """

    member_ids: tuple[int, ...]

    @abstractmethod
    def _run_plan(
        self,
        name: str,
        make: PlanOf,
        arguments: tuple[Any, ...],
        options: CallOptions,
        tag: int | None = None,
    ) -> Work:
        """Start the plan ``make(context, *arguments)``: a collective, or a message if there is a ``tag``."""

    @abstractmethod
    def _receiving(self, make: PlanOf) -> PlanOf:
        """Let the plan of a receive return the global rank of the sender instead of its id, if these differ."""

    def all_gather_object(
        self, output: list[Any], value: Any, weights_only: bool = False, **options: Unpack[CallOptions]
    ) -> Work[list[Any]]:
        """Gather every rank's object into every rank's list."""
        args = output, value, weights_only
        return self._run_plan("all_gather_object", p2p.all_gather_object, args, options)

    def gather_object(
        self, value: Any, output: list[Any] | None, dst: int, weights_only: bool = False, **options: Unpack[CallOptions]
    ) -> Work[list[Any] | None]:
        """Gather every rank's object into the list of rank ``dst``; ``output`` is None on the other ranks."""
        args = value, output, dst, weights_only
        return self._run_plan("gather_object", p2p.gather_object, args, options)

    def scatter_object_list(
        self,
        output: list[Any],
        values: Sequence[Any] | None,
        src: int,
        weights_only: bool = False,
        **options: Unpack[CallOptions],
    ) -> Work[list[Any]]:
        """Put the ``i``-th object of rank ``src``'s list into rank ``i``'s ``output[0]``."""
        args = output, values, src, weights_only
        return self._run_plan("scatter_object_list", p2p.scatter_objects, args, options)

    def broadcast_object_list(
        self, values: list[Any], src: int, weights_only: bool = False, **options: Unpack[CallOptions]
    ) -> Work[list[Any]]:
        """Replace every rank's list by the list of rank ``src``."""
        args = values, src, weights_only
        return self._run_plan("broadcast_object_list", p2p.broadcast_objects, args, options)

    def send_object_list(
        self, values: Sequence[Any], dst: int, tag: int = 0, weights_only: bool = False, **options: Unpack[CallOptions]
    ) -> Work[None]:
        """Send a list of objects to rank ``dst``."""
        args = values, dst, weights_only
        return self._run_plan("send_object_list", p2p.send_objects, args, options, tag)

    def recv_object_list(
        self,
        values: list[Any],
        src: int | None = None,
        tag: int = 0,
        weights_only: bool = False,
        **options: Unpack[CallOptions],
    ) -> Work[int]:
        """Receive a list of objects of the same length; the result is the global rank of the sender."""
        args = values, src, self.member_ids, weights_only
        return self._run_plan("recv_object_list", self._receiving(p2p.receive_objects), args, options, tag)
