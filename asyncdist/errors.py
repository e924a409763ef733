"""The exception classes of this package. Every folder may import this module.

    AsyncdistError (RuntimeError)
    ├── UsageError (ValueError)              the call is wrong; nothing was sent
    │   ├── NotInitializedError              there is no process group, or it was destroyed
    │   ├── AlreadyInitializedError          a second init_process_group without a destroy
    │   ├── LoopThreadError                  a blocking wait on the thread that runs the event loop
    │   └── UnsupportedError                 this dtype, operation or platform is not supported
    ├── GroupError                           a collective failed; has group, rank, op, seq, elapsed
    │   ├── PeerLostError (ConnectionError)  a peer died or became unreachable
    │   ├── OperationTimeoutError (TimeoutError)
    │   ├── MismatchError (ValueError)       the ranks issued different calls
    │   ├── GroupAbortedError                a call after the group failed, or after abort() on a rank
    │   ├── NoQuorumError                    too few members are left to go on
    │   └── ExcludedError                    the other members go on without this rank
    ├── CallError, NameNotFoundError         a remote call failed: see `asyncdist.rpc.errors`
    ├── WaitTimeoutError (TimeoutError)      only the wait ended; the operation continues
    ├── RendezvousError                      the ranks did not find each other
    │   ├── RendezvousTimeoutError (TimeoutError)
    │   ├── JobTimeoutError (TimeoutError)   a job had too few processes: see `asyncdist.elastic.errors`
    │   └── AddressError (OSError)           a port is in use, a host does not resolve
    │       └── LookUpTimeoutError (TimeoutError)  the name server did not answer in time
    ├── StoreError
    │   ├── StoreTimeoutError (TimeoutError)
    │   ├── QueueEmptyError                  a non-blocking pop from an empty queue
    │   ├── JournalError                     a store's data on disk is damaged, or cannot be written
    │   └── StoreConnectionError (ConnectionError)
    ├── AuthenticationError                  one side does not hold the job's token
    │   └── CertificateError                 TLS: one side does not trust the other's certificate
    ├── GradientError                        backward computed no gradient, or two, or stopped early
    ├── UnevenInputsError                    a rank ran out of inputs first, and join() was told to raise
    ├── WeightsError                         published weights could not be read: see `asyncdist.weights.errors`
    ├── ProtocolError                        the peer sent bytes of another protocol
    ├── BenchmarkError                       a rank of `asyncdist bench` failed, or a result was wrong
    ├── SharedMemoryError (MemoryError)      the machine provides no, or no more, shared memory
    └── TransportUnavailableError            a transport that was requested by name cannot be used here

The classes hold fields and build their message in ``_text``. A message says what happened, where, and what to do next.
``str(error)`` adds a line with the command that shows the class's section of docs/errors.md.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from asyncdist.base.ops import is_message
from asyncdist.base.release import REFERENCE, reference_to

_DOCUMENTED = (__name__, "asyncdist.elastic.errors", "asyncdist.rpc.errors", "asyncdist.weights.errors")


class AsyncdistError(RuntimeError):
    """Base of every error of this package. The last line of ``str(error)`` is the command that explains its class."""

    # Not named `message`: torch's DataLoader calls error classes with such an attribute with ``message=``.
    @property
    def summary(self) -> str:
        """The message without that line, for use inside other texts."""
        # The text may contain the whole text of another error, also of one that another process raised.
        return REFERENCE.sub("", self._text())

    def __str__(self) -> str:
        # The classes of these modules have sections; a class derived from them elsewhere is described by its base's.
        documented = next(kind for kind in type(self).__mro__ if kind.__module__ in _DOCUMENTED)
        return f"{self.summary}{reference_to(documented.__name__)}"

    def _text(self) -> str:
        return super().__str__()


# -- the call itself --------------------------------------------------------------------------


class UsageError(AsyncdistError, ValueError):
    """The call itself is wrong. No byte was sent, and the group remains usable.

    Attributes:
        group: Name of the group whose operation was refused; None for other calls.
        rank: Global rank of this process; None for other calls.
        op: Name of the operation; None for other calls.
    """

    group: str | None = None
    rank: int | None = None
    op: str | None = None
    _usual_reason = ""

    def during(self, *, group: str, rank: int, op: str) -> None:
        """Record the operation that was refused, unless one is recorded."""
        if self.op is None:
            self.group, self.rank, self.op = group, rank, op

    def _text(self) -> str:
        return (f"{self.op} on group {self.group!r}, rank {self.rank}: " if self.op else "") + self._reason()

    def _reason(self) -> str:
        return super()._text() or self._usual_reason


class NotInitializedError(UsageError):
    """There is no process group: it was never created, or it has been destroyed."""

    _usual_reason = "no process group: call init_process_group() first"


class AlreadyInitializedError(UsageError):
    """The default process group already exists."""

    _usual_reason = (
        "the default process group already exists: call destroy_process_group() first, "
        "or open an independent world with asyncdist.process_group(...)"
    )


class LoopThreadError(UsageError):
    """A blocking wait on the thread whose event loop completes the operation, also if it is complete already."""

    def _reason(self) -> str:
        what = self.args[0] if self.args else "this operation"
        return (
            f"wait() for {what} on the event loop's own thread would stop the loop that completes it: use `await work`, "
            "or asyncio.to_thread(). The calls of asyncdist.sync are the blocking API, those of asyncdist can be awaited"
        )


class UnsupportedError(UsageError):
    """This dtype, operation or platform is not supported."""


# -- a collective -----------------------------------------------------------------------------

UNREACHED = "check ASYNCDIST_SOCKET_IFNAME on that rank, routes and firewalls"


class GroupError(AsyncdistError):
    """A collective or a message failed.

    Attributes:
        group: Name of the group.
        rank: Global rank of this process.
        op: Name of the operation; None if no operation was in flight.
        seq: Sequence number of the collective, or the tag of a message; None if no operation was in flight.
        elapsed: Seconds since the operation was issued.
        by: Global rank that detected the failure; None if this rank did.
    """

    advice = ""

    def __init__(
        self,
        reason: str,
        *,
        group: str = "",
        rank: int | None = None,
        op: str | None = None,
        seq: int | None = None,
        elapsed: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.group = group
        self.rank = rank
        self.op = op
        self.seq = seq
        self.elapsed = elapsed
        self.by: int | None = None
        # Groups of which an operation's error has been logged. Copies of this error share it.
        self._logged: set[str] = set()

    def begin_log(self) -> bool:
        """Return whether this failure of the group has not been logged yet on this rank; the next calls return False."""
        if self.group in self._logged:
            return False
        self._logged.add(self.group)
        return True

    def during(self, *, group: str, rank: int, op: str, seq: int, elapsed: float) -> GroupError:
        """Return a copy of this failure for one operation that it ended."""
        error = copy.copy(self)
        error.group, error.rank, error.op, error.seq, error.elapsed = group, rank, op, seq, elapsed
        error.__cause__ = self.__cause__
        return error

    def explain(self, cause: str) -> None:
        """Add why the ranks that the operation waited for cannot be reached; an empty ``cause`` adds nothing."""
        if cause:
            self.reason += f" ({cause})"
            self.advice = UNREACHED

    def _text(self) -> str:
        where = ""
        if self.op is not None:
            which = f"with tag {self.seq}" if is_message(self.op) else f"#{self.seq}"
            where = f"{self.op} {which} on group {self.group!r}, rank {self.rank}"
            if self.elapsed is not None:
                where += f", after {self.elapsed:.1f} s"
            where += ": "
        elif self.group:
            where = f"group {self.group!r}, rank {self.rank}: "
        return f"{where}{self.reason}{'; ' + self.advice if self.advice else ''}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(kind: type[GroupError], args: tuple[object, ...], fields: dict[str, object]) -> GroupError:
    """Return an instance without running its constructor, which has other arguments."""
    # Subclasses of OSError have their own memory layout.
    error = (OSError if issubclass(kind, OSError) else RuntimeError).__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class PeerLostError(GroupError, ConnectionError):
    """A peer died, left, or became unreachable.

    Attributes:
        peer: Its global rank; the name of a process that is in no common group.
        noticed: ``"connection"`` if the connection to it has ended or cannot be used, ``"heartbeat"`` if it was silent.
        why: The event that ended it, as a clause.
        last_heard: The seconds before this error at which the rank that noticed last heard the peer's heartbeat; None if it
            watched none.
    """

    noticed = "connection"
    last_heard: float | None = None

    advice = (
        "read that rank's log first; then call regroup() on the other ranks, which go on without it, or destroy the "
        "process group and create it again"
    )

    def __init__(self, peer: int | str, reason: str, **where: object) -> None:
        who = f"rank {peer}" if isinstance(peer, int) else peer
        super().__init__(f"{who} was lost ({reason})", **where)  # type: ignore[arg-type]
        self.peer, self.why = peer, reason
        if isinstance(peer, str):
            self.advice = "read the log of that process"


class OperationTimeoutError(GroupError, TimeoutError):
    """An operation's deadline passed.

    Attributes:
        peers: Global ranks: those at the end of the chain of waiting ranks that do not answer or have no pending call, if
            this rank could tell; else those for which the operation waited.
        awaited: Global ranks for which the operation waited.
        timeout: The operation's timeout in seconds.
    """

    advice = (
        "check whether those ranks issued the same call; if they are only slow, pass a longer timeout= to "
        "init_process_group or new_group"
    )

    def __init__(
        self,
        reason: str,
        *,
        peers: Sequence[int] = (),
        awaited: Sequence[int] = (),
        timeout: float = 0.0,
        **where: object,
    ) -> None:
        super().__init__(reason, **where)  # type: ignore[arg-type]
        self.peers = tuple(peers)
        self.awaited = tuple(awaited or peers)
        self.timeout = timeout


class MismatchError(GroupError, ValueError):
    """The ranks of one group issued different calls. ``peer`` is the rank whose call differs from this rank's."""

    advice = (
        "every rank must issue the same operations in the same order, and both ends of a message must match, with equal "
        "shapes, dtypes and arguments"
    )

    def __init__(self, peer: int, reason: str, **where: object) -> None:
        super().__init__(reason, **where)  # type: ignore[arg-type]
        self.peer = peer


class GroupAbortedError(GroupError):
    """The group failed earlier or was aborted, and accepts no operations. ``peer`` is the rank that reported it."""

    advice = "call regroup() on every rank of the group, or destroy it and create a new one"

    def __init__(self, reason: str, *, peer: int | None = None, **where: object) -> None:
        super().__init__(reason, **where)  # type: ignore[arg-type]
        self.peer = peer


class NoQuorumError(GroupError):
    """Too few members of the group are left to go on: fewer than ``min_size``, or others may go on elsewhere.

    ``present`` are the ids (`Group.member_ids`) of the members that this rank could reach.
    """

    advice = "ranks that this one does not reach may go on without it: end this process, or start the job again"

    def __init__(self, reason: str, *, present: Sequence[int] = (), **where: object) -> None:
        super().__init__(reason, **where)  # type: ignore[arg-type]
        self.present = tuple(present)


class ExcludedError(GroupError):
    """The other members have agreed to go on without this rank, which they hold lost. The reason says why."""

    advice = "end this process, or join the job again as a new rank"


class WaitTimeoutError(AsyncdistError, TimeoutError):
    """``wait(timeout=...)`` timed out. The operation itself continues: wait again, or abort the group."""


# -- rendezvous --------------------------------------------------------------------------------


class RendezvousError(AsyncdistError):
    """The ranks did not find each other."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """Not every rank joined in time.

    Attributes:
        joined: Ranks that joined. A rank that cannot reach the store knows only of itself.
        missing: Ranks that did not join. A rank that cannot reach the store knows only of rank 0.
        timeout: Seconds for which this rank waited.
        where: The meeting point.
        world_size: Number of ranks.
        seen: Why rank 0 was not found; empty if it was.
    """

    def __init__(
        self,
        joined: Sequence[int],
        missing: Sequence[int],
        timeout: float,
        where: str,
        world_size: int | None = None,
        seen: str = "",
    ) -> None:
        super().__init__(joined, missing, timeout, where, world_size, seen)
        self.joined = tuple(joined)
        self.missing = tuple(missing)
        self.timeout = timeout
        self.where = where
        self.world_size = len(self.joined) + len(self.missing) if world_size is None else world_size
        self.seen = seen

    def _text(self) -> str:
        known = f"joined {ranks(self.joined)}, missing {ranks(self.missing)}"
        what = f"only {len(self.joined)} of {self.world_size} ranks had joined at {self.where}: {known}"
        if self.seen:
            what = f"rank {ranks(self.joined)} of {self.world_size} had not found rank 0 at {self.where} ({self.seen})"
        return (
            f"after {self.timeout:g} s {what}; "
            "check whether the missing ranks were started with the same address, world size and token"
        )


class AddressError(RendezvousError, OSError):
    """An address cannot be used: the port is in use, the host does not resolve, or the interface does not exist."""

    def _text(self) -> str:
        return str(self.args[0])


class LookUpTimeoutError(AddressError, TimeoutError):
    """The name server did not answer before the deadline, so it is unknown whether the host resolves."""


# -- store ------------------------------------------------------------------------------------


class StoreError(AsyncdistError):
    """The store refused an operation or could not complete it."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A store operation did not complete in time. ``keys`` are its keys, ``reason`` is the text of the message."""

    def __init__(
        self,
        operation: str,
        keys: Sequence[str] = (),
        timeout: float | None = None,
        reason: str = "the keys were not set, or the store had not sent the whole answer",
    ) -> None:
        super().__init__(operation, keys, timeout, reason)
        self.operation = operation
        self.keys = tuple(keys)
        self.timeout = timeout
        self.reason = reason

    def _text(self) -> str:
        names = _first(self.keys)
        after = f" after {self.timeout:g} s" if self.timeout is not None else ""
        return f"store {self.operation}({names}) timed out{after}: {self.reason}"


class QueueEmptyError(StoreError):
    """``queue_pop(..., block=False)`` found the queue empty."""


class JournalError(StoreError):
    """A store's data on disk is damaged, in use by another process, or cannot be read or written."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store cannot be reached, or the connection to it was lost."""


class AuthenticationError(AsyncdistError):
    """One side of a connection does not hold the job's token."""

    def _text(self) -> str:
        reason = self.args[0] if self.args else "the other side refused the token of this process"
        return f"{reason}; set ASYNCDIST_TOKEN to the same value on every rank and on the store"


class CertificateError(AuthenticationError):
    """The TLS handshake failed: one side does not trust the other's certificate."""

    def _text(self) -> str:
        return (
            f"the TLS handshake with the other side failed ({self.args[0]}): both sides need certificates that are signed "
            "by the other's ASYNCDIST_TLS_CA, valid now, and issued for the name that is dialled"
        )


class GradientError(AsyncdistError):
    """Backward did not compute exactly one gradient for each parameter of a DistributedDataParallel.

    Also raised if `torch.autograd.grad` or torch's distributed autograd computes gradients of parameters, which are not
    averaged.

    ``parameters`` are the names of the parameters concerned.
    """

    def __init__(self, reason: str, parameters: Sequence[str] = ()) -> None:
        super().__init__(reason, parameters)
        self.reason = reason
        self.parameters = tuple(parameters)

    def _text(self) -> str:
        return self.reason.format(parameters=_first(self.parameters))


class UnevenInputsError(AsyncdistError):
    """Inside ``join(throw_on_early_termination=True)`` some ranks ran out of inputs before others; all ranks raise it.

    ``ended`` and ``going`` are their global ranks.
    """

    def __init__(self, ended: Sequence[int], going: Sequence[int]) -> None:
        super().__init__(ended, going)
        self.ended = tuple(ended)
        self.going = tuple(going)

    def _text(self) -> str:
        ended, going = (", ".join(map(str, ranks)) for ranks in (self.ended, self.going))
        return (
            f"rank {ended} ran out of inputs while rank {going} had more: give every rank the same number of inputs, "
            "or leave out throw_on_early_termination, so that ranks without inputs contribute zeros"
        )


class ProtocolError(AsyncdistError):
    """The other side sent bytes of another protocol."""


class BenchmarkError(AsyncdistError):
    """A rank of a benchmark failed, or a contender computed a wrong result. The benchmark reports no figures."""


class SharedMemoryError(AsyncdistError, MemoryError):
    """The machine provides no, or no more, shared memory. The failed call changed nothing."""


class TransportUnavailableError(AsyncdistError):
    """A transport that was requested by name cannot be used here. The message says why and which transports exist."""


def _first(names: Sequence[str]) -> str:
    """Return the first eight names as a short text."""
    return ", ".join(map(repr, names[:8])) + (", …" if len(names) > 8 else "")


def ranks(numbers: Sequence[int]) -> str:
    """Return ranks as a short text: ``"0-2, 5"`` for ``[0, 1, 2, 5]``, ``"none"`` for an empty list."""
    runs: list[list[int]] = []
    for rank in sorted(numbers):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"
