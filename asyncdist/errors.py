"""Every failure that asyncdist raises, by subsystem and by whose fault it was.

    AsyncdistError (RuntimeError)
    ├── UsageError (ValueError)              you: the call itself is wrong; nothing was sent
    │   ├── NotInitializedError              no process group yet, or it was destroyed
    │   ├── AlreadyInitializedError          a second init_process_group without a destroy
    │   ├── LoopThreadError                  a blocking wait on the thread that drives the loop
    │   └── UnsupportedError                 this dtype, operation or platform cannot do it
    ├── GroupError                           a collective failed; carries group, rank, op, seq, elapsed
    │   ├── PeerLostError (ConnectionError)  the world: a peer died or became unreachable
    │   ├── OperationTimeoutError (TimeoutError)
    │   ├── MismatchError                    you, on some rank: the ranks issued different calls
    │   └── GroupAbortedError                a call after the group failed, or abort() by someone
    ├── WaitTimeoutError (TimeoutError)      only the waiting stopped; the operation goes on
    ├── RendezvousError                      the world did not come together
    │   ├── RendezvousTimeoutError (TimeoutError)
    │   └── AddressError (OSError)           a port in use, a host that does not resolve
    │       └── LookUpTimeoutError (TimeoutError)  nobody has said in time whether it resolves
    ├── StoreError
    │   ├── StoreTimeoutError (TimeoutError)
    │   ├── QueueEmptyError                  a pop that does not wait, from an empty queue
    │   ├── JournalError                     a store's data on disk is damaged, or cannot be written
    │   └── StoreConnectionError (ConnectionError)
    ├── AuthenticationError                  one side does not hold the job's token
    │   └── CertificateError                 TLS: one side does not believe the other's certificate
    ├── GradientError                        you: backward gave no gradient, or two, or stopped half-way
    ├── UnevenInputsError                    you: a rank ran out of inputs first, which join() was told to refuse
    ├── ProtocolError                        remote: bytes that are not our protocol
    ├── BenchmarkError                       a rank of `asyncdist bench` failed, or a result was wrong
    ├── SharedMemoryError (MemoryError)      the machine: no shared memory to be had, or no more of it
    └── TransportUnavailableError            asked for by name, cannot be used here

They carry fields and build their sentence late, in ``__str__``; each sentence ends with what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncdist.base.ops import is_message


class AsyncdistError(RuntimeError):
    """Base of every error of this package."""


# -- your call --------------------------------------------------------------------------------


class UsageError(AsyncdistError, ValueError):
    """The call itself is wrong; no byte was sent and no group was harmed.

    Attributes, of an operation that was refused: ``group`` (name), ``rank`` (ours, in the world), ``op``; else None.
    """

    group: str | None = None
    rank: int | None = None
    op: str | None = None

    def during(self, *, group: str, rank: int, op: str) -> None:
        """Note which operation it was, if that is not known yet."""
        if self.op is None:
            self.group, self.rank, self.op = group, rank, op

    def __str__(self) -> str:
        return (f"{self.op} on group {self.group!r}, rank {self.rank}: " if self.op else "") + self._reason()

    def _reason(self) -> str:
        return super().__str__()


class NotInitializedError(UsageError):
    """There is no process group: it was never made, or it has been destroyed."""

    def _reason(self) -> str:
        return self.args[0] if self.args else "no process group: call init_process_group() first"


class AlreadyInitializedError(UsageError):
    """The default process group exists already."""

    def _reason(self) -> str:
        return (
            "the default process group exists already: call destroy_process_group() first, "
            "or open an independent world with asyncdist.process_group(...)"
        )


class LoopThreadError(UsageError):
    """A blocking wait on the thread whose event loop would have to finish the operation."""

    def _reason(self) -> str:
        what = self.args[0] if self.args else "this operation"
        return f"wait() for {what} on the event loop's own thread would never return: use `await` instead"


class UnsupportedError(UsageError):
    """This dtype, operation or platform cannot do what was asked."""


# -- a collective -----------------------------------------------------------------------------

UNREACHED = "see ASYNCDIST_SOCKET_IFNAME there, routes and firewalls"


class GroupError(AsyncdistError):
    """A collective failed.

    Attributes: ``group`` (name), ``rank`` (ours, in the world), ``op`` and ``seq`` (which call, of a message its tag;
    ``None`` when no call was in flight), ``elapsed`` (seconds since it was issued).
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
        self.by: int | None = None  # the rank that noticed, if it was not we

    def during(self, *, group: str, rank: int, op: str, seq: int, elapsed: float) -> GroupError:
        """Return the same failure as seen by one operation that it ended."""
        seen = _blank(type(self))
        seen.__dict__.update(self.__dict__)
        seen.args = self.args
        seen.group, seen.rank, seen.op, seen.seq, seen.elapsed = group, rank, op, seq, elapsed
        seen.__cause__ = self.__cause__
        return seen

    def explain(self, trouble: str) -> None:
        """Add what keeps us from a rank that was waited for, if anything does: then that is what to look after."""
        if trouble:
            self.reason += f" ({trouble})"
            self.advice = UNREACHED

    def __str__(self) -> str:
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


def _blank(kind: type[GroupError]) -> GroupError:
    """Return an instance without running its constructor; OSError's kin have a memory layout of their own."""
    maker = OSError.__new__ if issubclass(kind, OSError) else RuntimeError.__new__
    return maker(kind)


def _rebuild(kind: type[GroupError], args: tuple[object, ...], fields: dict[str, object]) -> GroupError:
    error = _blank(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class PeerLostError(GroupError, ConnectionError):
    """A peer died, left, or became unreachable. ``peer`` is its rank in the world."""

    advice = "look at that rank's own log first; then destroy the process group and start it again without the rank"

    def __init__(self, peer: int, reason: str, **where: object) -> None:
        super().__init__(f"rank {peer} was lost ({reason})", **where)  # type: ignore[arg-type]
        self.peer = peer


class OperationTimeoutError(GroupError, TimeoutError):
    """An operation's own deadline passed. ``peers`` are the ranks it was waiting for, in the world."""

    advice = (
        "see whether those ranks issued the same call; if they are only slow, pass a longer timeout= to "
        "init_process_group or new_group"
    )

    def __init__(self, reason: str, *, peers: Sequence[int] = (), timeout: float = 0.0, **where: object) -> None:
        super().__init__(reason, **where)  # type: ignore[arg-type]
        self.peers = tuple(peers)
        self.timeout = timeout


class MismatchError(GroupError, ValueError):
    """The ranks of one group issued different calls. ``peer`` is the rank that differs from ours."""

    advice = (
        "every rank must issue the same operations in the same order, and the ends of a message alike, with equal shapes, "
        "dtypes and arguments"
    )

    def __init__(self, peer: int, reason: str, **where: object) -> None:
        super().__init__(reason, **where)  # type: ignore[arg-type]
        self.peer = peer


class GroupAbortedError(GroupError):
    """The group failed earlier or was aborted; it takes no more operations. ``peer`` is who said so."""

    advice = "destroy this group and make a new one"

    def __init__(self, reason: str, *, peer: int | None = None, **where: object) -> None:
        super().__init__(reason, **where)  # type: ignore[arg-type]
        self.peer = peer


class WaitTimeoutError(AsyncdistError, TimeoutError):
    """``wait(timeout=...)`` gave up waiting. The operation itself goes on; wait again, or abort the group."""


# -- coming together --------------------------------------------------------------------------


class RendezvousError(AsyncdistError):
    """The world did not come together."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """Not every rank joined in time. ``joined`` and ``missing`` are ranks; ``seen`` says what was seen instead.

    A rank that cannot reach the store knows of itself and of rank 0 only: then the two lists do not make up the
    ``world_size``.
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

    def __str__(self) -> str:
        known = f"joined {ranks(self.joined)}, missing {ranks(self.missing)}"
        what = f"only {len(self.joined)} of {self.world_size} ranks had joined at {self.where}: {known}"
        if self.seen:
            what = f"rank {ranks(self.joined)} of {self.world_size} had not found rank 0 at {self.where} ({self.seen})"
        return (
            f"after {self.timeout:g} s {what}; "
            "see whether the missing ranks were started with the same address, world size and token"
        )


class AddressError(RendezvousError, OSError):
    """An address cannot be used: the port is taken, the host does not resolve, the interface does not exist."""

    def __str__(self) -> str:
        return str(self.args[0])


class LookUpTimeoutError(AddressError, TimeoutError):
    """The time was over before anybody had said where a host is: nothing is known of its name."""


# -- store ------------------------------------------------------------------------------------


class StoreError(AsyncdistError):
    """The store refused or could not do an operation."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A store operation did not finish in time; ``keys`` are those that it is about, ``reason`` says what that means."""

    def __init__(
        self,
        operation: str,
        keys: Sequence[str] = (),
        timeout: float | None = None,
        reason: str = "what it waits for was not set, or had not come in full from the store",
    ) -> None:
        super().__init__(operation, keys, timeout, reason)
        self.operation = operation
        self.keys = tuple(keys)
        self.timeout = timeout
        self.reason = reason

    def __str__(self) -> str:
        names = ", ".join(repr(key) for key in self.keys[:8]) + (", …" if len(self.keys) > 8 else "")
        after = f" after {self.timeout:g} s" if self.timeout is not None else ""
        return f"store {self.operation}({names}) timed out{after}: {self.reason}"


class QueueEmptyError(StoreError):
    """``queue_pop(..., block=False)`` found the queue empty."""


class JournalError(StoreError):
    """A store's data on disk is damaged, is in use, or cannot be read or written."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store cannot be reached, or the connection to it broke."""


class AuthenticationError(AsyncdistError):
    """One side of a connection does not hold the job's token."""

    def __str__(self) -> str:
        said = self.args[0] if self.args else "the other side refused our token"
        return f"{said}; set ASYNCDIST_TOKEN to the same value on every rank and on the store"


class CertificateError(AuthenticationError):
    """There is no TLS with the other side: one of the two does not believe the other's certificate."""

    def __str__(self) -> str:
        return (
            f"no TLS with the other side ({self.args[0]}): both need certificates that the other's ASYNCDIST_TLS_CA has "
            "signed, in their time, and for the name that is dialled"
        )


class GradientError(AsyncdistError):
    """Backward did not give every parameter of a DistributedDataParallel its one gradient.

    ``parameters`` are the names of those concerned.
    """

    def __init__(self, reason: str, parameters: Sequence[str] = ()) -> None:
        super().__init__(reason, parameters)
        self.reason = reason
        self.parameters = tuple(parameters)

    def __str__(self) -> str:
        names = ", ".join(repr(name) for name in self.parameters[:8]) + (", …" if len(self.parameters) > 8 else "")
        return self.reason.format(parameters=names)


class UnevenInputsError(AsyncdistError):
    """Inside ``join(throw_on_early_termination=True)`` some ranks ran out of inputs before others; all ranks raise it.

    ``ended`` and ``going`` are their global ranks.
    """

    def __init__(self, ended: Sequence[int], going: Sequence[int]) -> None:
        super().__init__(ended, going)
        self.ended = tuple(ended)
        self.going = tuple(going)

    def __str__(self) -> str:
        ended, going = (", ".join(map(str, ranks)) for ranks in (self.ended, self.going))
        return (
            f"rank {ended} ran out of inputs while rank {going} had more: give every rank as many, "
            "or leave throw_on_early_termination out, and those that run out stand in with zeros"
        )


class ProtocolError(AsyncdistError):
    """The other side sent bytes that are not our protocol."""


class BenchmarkError(AsyncdistError):
    """A rank of a benchmark failed, or a contender computed a wrong result; there are no figures then."""


class SharedMemoryError(AsyncdistError, MemoryError):
    """There is no shared memory to be had here, or no more of it; nothing was half done."""


class TransportUnavailableError(AsyncdistError):
    """A transport was asked for by name and cannot be used here; the sentence says why and what exists."""


def ranks(numbers: Sequence[int]) -> str:
    """Write ranks the short way: ``[0, 1, 2, 5]`` becomes ``"0-2, 5"``, none becomes ``"none"``."""
    runs: list[list[int]] = []
    for rank in sorted(numbers):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"
