"""What a way between devices offers: whole collectives, put into a device's queues. The contract of such transports.

An `DeviceCollectives` is made on every rank of a group, for one device of each. It says in a *capabilities* what the others must know of
it; from all all_capabilities, which every rank has, each works out whether they fit together (`refusal`: the same answer everywhere);
then it is opened, on every rank or on none.

Its collectives are those of `native.Native`, but they never wait for the device: they are called within
``streams.on_comm_stream()``, in the order of the calls, on whatever thread the line has, and have put everything into queues when
their schedule is over. They may block the host until peers have made the same call.

To write one: implement `DeviceCollectives`, and announce the class under the entry-point group ``asyncdist.ensembles``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from asyncdist.algorithms.schedule import Schedule
from asyncdist.base.network import machine_name
from asyncdist.transport.device_streams import Streams
from asyncdist.transport.host_group import HostGroup
from asyncdist.transport.native import Native

if TYPE_CHECKING:
    from asyncdist.transport.device_p2p import DeviceP2P

Capabilities = Mapping[str, Any]


class DeviceContext:
    """Where an backend stands: who we are, on which device, and the group by which ranks speak from host to host.

    ``deadline`` (monotonic) is that of the call in hand, or of the meeting.
    """

    def __init__(self, host: HostGroup, streams: Streams) -> None:
        self.host = host
        self.streams = streams
        self.rank = host.rank()
        self.size = host.size()
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.deadline = math.inf
        self.inherited: dict[str, Any] = {}  # by the name of a way: what a larger group has split off for us

    @property
    def machine(self) -> str:
        """What names the machine that we are on."""
        return self.host.mesh.config.host or machine_name()

    @property
    def remaining(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - monotonic())

    def all_gather_object(self, value: Any) -> list[Any]:
        """Give every rank an object (plain data) and return everybody's, by rank. Blocks; raises GroupError."""
        gathered: list[Any] = [None] * self.size
        self.host.all_gather_object(gathered, value, background=False, timeout=self.remaining).result()
        return gathered

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Give every rank some bytes, as many on all, and return everybody's, by rank. Blocks; raises GroupError."""
        ours = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        gathered = torch.empty(self.size * len(payload), dtype=torch.uint8, device="cpu")
        self.host.all_gather_single(gathered, ours, background=False, timeout=self.remaining).result()
        return [bytes(part.numpy()) for part in gathered.split(len(payload))]

    def mismatch_error(self, rank: int, ours: int, theirs: int) -> Exception:
        """Return the error to raise where a rank's fingerprint of a collective is not ours."""
        return self.host.mesh.difference(self.host.ranks[rank], ours, theirs)

    def barrier(self) -> None:
        """Block until every rank has come here. Raises GroupError."""
        self.host.barrier(background=False, timeout=self.remaining).result()


class DeviceCollectives(Native):
    """One rank's part in a way between devices. ``name`` is what users select it by; ``preference`` orders choice.

    ``blocks`` says that its collectives may keep the host waiting for peers, ``compares`` that ranks whose calls differ
    are gathered.
    """

    name: ClassVar[str]
    preference: ClassVar[int] = 0
    blocks: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __init__(self, context: DeviceContext) -> None:
        self.context = context

    @classmethod
    @abstractmethod
    def probe(cls) -> str | None:
        """Return None if this way can be used in this process, else the reason in words."""

    @classmethod
    def make_p2p(cls, context: DeviceContext) -> DeviceP2P | None:
        """Return what carries messages this way, for one rank; None if they had better go another. Meets nobody."""
        return None

    # -- coming together -----------------------------------------------------------------------

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return what the other ranks need to know of us: plain data."""

    @abstractmethod
    def refusal(self, all_capabilities: Sequence[Capabilities]) -> str | None:
        """Return why these ranks cannot go this way, None if they can; the same on every rank, by the all_capabilities alone."""

    @abstractmethod
    def start(self, all_capabilities: Sequence[Capabilities]) -> None:
        """Meet the others; raise what stands in the way, in words. Blocks."""

    # -- while it is used ----------------------------------------------------------------------

    def async_error(self) -> Exception | None:
        """Return what has gone wrong beside any call, None if nothing has. Called now and then, from any thread."""
        return None

    def split(self, context: DeviceContext | None, number: int) -> None:
        """Put what a part of these ranks can share with us into the ``inherited`` of its context.

        Each rank gives the number of its part; None and -1 if it is in none. Called on all, in the order of the calls; may
        block. What is put there has a ``close``.
        """
        return

    @abstractmethod
    def abort(self) -> None:
        """End what the device still waits for, as the group has failed; never blocks."""

    def open(self) -> None:
        """Nothing to do: `start` has met the others."""

    def announce(self, number: int, fingerprint: int) -> Schedule:
        return nothing()


def nothing() -> Schedule:
    """Return a schedule that is over."""
    yield from ()
