"""Decides whether what the processes of a world report is allowed. No I/O, no clock.

A report is a tuple that a process sends:

    addresses, rank, addresses                      asks where to connect to instead
    entered, generation, rank, members, id, (world, rank there)
                                                    it is a member of a new group
    waits                                           it waits to join a job, as others can see
    rounds, [(generation, number, committed, time), …]  the rounds that it has been through, and when on the monotonic clock
    failed, kind, peer, text                        an operation has failed
    raised · leaves · forked, pid                   a fault has happened
    out, kind, text                                 a founder cannot go on
    called, [process, …], failed                    its remote calls: processes that have answered, number of failures
    read, number                                    it has read a version of the published weights
    violation, text                                 it has seen something that must not happen
    ended                                           it has left and closed everything

What must hold:

- Members that are alive never disagree: on who is a member of a generation, and whether a round is committed.
- No process commits more than one round of a generation after any process has committed one of a later generation. That one
  round is of a process that was stopped between the end of its step and its next line.
- No rank is reported lost that no fault has silenced.
- Every process that can run makes progress within the heartbeat limit and 5 s.
- Ranks that no fault has touched go on if all others have ended. Somebody goes on if one of the others is alive and most
  founders were not touched. After one separation of the hosts at least half of the founders go on.
- In a job that replaces its members, all living processes end up in one generation. They call each other with success,
  and those that read the weights get new versions.
"""

from dataclasses import dataclass, field

from tests.chaos.plan import HARMLESS, HEARTBEAT, OF_A_HOST, Fault, WorldPlan

PATIENCE = HEARTBEAT + 5.0
"""Seconds without progress after which a process hangs."""
STARTING = 20.0
"""Seconds in which a process starts and meets the others, on a machine that is busy with other programs."""
MEETING = 10.0
"""Seconds for which the members of a job wait for a newcomer that was named and does not come."""
_ECHO = 2.0 * HEARTBEAT + 1.0
"""Seconds after the end of a fault in which its victims may still be reported lost."""
_NOT_LOST = ("it has destroyed its process group", "it has declared this rank lost", "it found that rank")
"""What the reason says if the named rank lives, and has left or has lost this one."""
ROUNDS_AFTER = 3
"""Rounds that the members must commit after the last fault."""


class ViolationError(AssertionError):
    """Something has happened that must not happen."""


@dataclass(eq=False)
class Witness:
    """A process, as the judge sees it.

    Attributes:
        slot: Its place in the plan.
        name: Its name in messages.
        progress: When it has last made progress.
        is_alive: Whether it runs or is stopped, as far as the runner knows.
        stops: The number of faults that keep it stopped now.
        harmed_until: Until when it may be reported lost.
        is_harmed: Whether a fault has ever made it lost.
        was_silent: Whether it has ever been alive and unheard.
        state: ``"starts"``, ``"member"``, ``"out"``, ``"leaves"`` or ``"ended"``.
        generation: The generation that it has entered last.
        rounds_after: The rounds that it has committed since the last fault, by generation.
        pid: Its process id.
        called_after: The processes that have answered its remote calls since the last fault.
        has_read_after: Whether it has read a version of the weights since the last fault.
        has_waited: Whether it waits to join a job, or has waited.
        last_but_one: When it has committed its last round but one, by generation.
        last: When it has committed its last round, by generation.
    """

    slot: int
    name: str
    progress: float
    is_alive: bool = True
    stops: int = 0
    harmed_until: float = -1.0
    is_harmed: bool = False
    was_silent: bool = False
    state: str = "starts"
    generation: int = -1
    size: int = 0
    world: str = ""
    rounds_after: dict[int, int] = field(default_factory=dict)
    pid: int = 0
    called_after: set[int] = field(default_factory=set)
    has_read_after: bool = False
    has_waited: bool = False
    last_but_one: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        """Whether it must make progress."""
        return self.is_alive and not self.stops and self.state in ("starts", "member", "leaves")


class Judge:
    """Follows one world. The runner passes in reports, faults and the time; `ViolationError` ends the world."""

    def __init__(self, plan: WorldPlan) -> None:
        self.plan = plan
        self.witnesses: list[Witness] = []
        self.is_settling = False
        self._harmful: list[str] = []
        self._entered: dict[int, dict[Witness, tuple[object, object]]] = {}
        self._committed: dict[tuple[int, int], dict[Witness, bool]] = {}
        self._by_rank: dict[tuple[str, int], Witness] = {}
        self._first_commit: dict[int, float] = {}
        self.accusations: list[tuple[float, str]] = []
        """When a process was blamed that no fault has touched, and what to say of it."""
        """When the first round of each generation was committed."""

    def add(self, slot: int, name: str, now: float) -> Witness:
        """Add a process that has started."""
        witness = Witness(slot, name, now)
        self.witnesses.append(witness)
        return witness

    # -- faults --------------------------------------------------------------------------------

    def harm(self, fault: Fault, now: float) -> None:
        """Note a fault that begins now."""
        if fault.kind in HARMLESS:
            return
        for witness in self.witnesses:
            if witness.is_alive and (fault.kind in OF_A_HOST or witness.slot in fault.victims):
                witness.harmed_until = max(witness.harmed_until, now + fault.seconds + _ECHO)
                witness.is_harmed = True
                witness.was_silent |= fault.kind not in ("kill", "leave")
        self._harmful.append(fault.kind)

    def stop(self, witness: Witness) -> None:
        witness.stops += 1

    def resume(self, witness: Witness, now: float) -> None:
        witness.stops -= 1
        witness.progress = now

    def killed(self, witness: Witness) -> None:
        """Note that a process was killed."""
        witness.is_alive = False
        self._forget(witness)

    def _forget(self, witness: Witness) -> None:
        """Forget the answers of a process that has ended: who is left may go on with other ones."""
        for reports in (*self._entered.values(), *self._committed.values()):
            reports.pop(witness, None)

    # -- reports -------------------------------------------------------------------------------

    def hear(self, witness: Witness, report: tuple[object, ...], now: float) -> None:
        """Handle a report."""
        kind, *values = report
        if kind not in ("called", "read"):  # they come from another thread
            witness.progress = now
        handle = getattr(self, f"_on_{kind}", None)
        if handle is not None:
            handle(witness, *values, **({"now": now} if kind == "failed" else {}))

    def _on_entered(self, witness, generation, rank, members, identity, world):
        witness.state, witness.generation, witness.world = "member", generation, world[0]
        witness.size = members if isinstance(members, int) else len(members)
        self._by_rank[world] = witness
        others = self._entered.setdefault(generation, {})
        for other, (place, of) in others.items():
            if of != members or place == rank:
                raise ViolationError(
                    f"generation {generation} has two parts: {witness.name} is rank {rank} of {members}, and {other.name} "
                    f"rank {place} of {of}"
                )
        others[witness] = rank, members

    def _on_waits(self, witness):
        witness.has_waited = True

    def _on_rounds(self, witness, rounds):
        for generation, number, committed, at in rounds:
            if committed is None:
                continue
            if committed:
                self._note_commit(witness, generation, at)
            others = self._committed.setdefault((generation, number), {})
            for other, answer in others.items():
                if answer is not committed:
                    yes, no = (witness, other) if committed else (other, witness)
                    raise ViolationError(
                        f"round {number} of generation {generation} is committed on {yes.name} and not on {no.name}"
                    )
            others[witness] = committed
            if self.is_settling and committed:
                witness.rounds_after[generation] = witness.rounds_after.get(generation, 0) + 1

    def _note_commit(self, witness, generation, at):
        if generation in witness.last:
            witness.last_but_one[generation] = witness.last[generation]
        witness.last[generation] = at
        self._first_commit[generation] = min(self._first_commit.get(generation, at), at)
        for late in self.witnesses:
            for old, time in late.last_but_one.items():
                for new, begun in self._first_commit.items():
                    if new > old and begun < time:
                        raise ViolationError(
                            f"two parts commit: {late.name} has committed two rounds of generation {old} "
                            f"{time - begun:.3f} s after one of generation {new}"
                        )

    def _on_failed(self, witness, kind, peer, text, *, now):
        if kind in ("MismatchError", "OperationTimeoutError"):
            raise ViolationError(f"{witness.name} has got {kind}: {text}")
        blamed = self._by_rank.get((witness.world, peer))
        if (
            kind != "PeerLostError"
            or any(reason in text for reason in _NOT_LOST)
            or blamed is None
            or not blamed.is_alive
        ):
            return
        if now > blamed.harmed_until and blamed.state not in ("leaves", "ended", "out"):
            message = f"{witness.name} blames {blamed.name}, which lives and was not touched: {text}"
            self.accusations.append((now, message))

    def _on_called(self, witness, answered, failed):
        if self.is_settling:
            witness.called_after.update(answered)

    def _on_read(self, witness, number):
        witness.has_read_after |= self.is_settling

    def _on_leaves(self, witness):
        witness.state = "leaves"

    def _on_out(self, witness, kind, text):
        witness.state = "out"

    def _on_ended(self, witness):
        witness.state = "ended"
        self._forget(witness)

    def _on_violation(self, witness, text):
        raise ViolationError(f"{witness.name} has seen {text}")

    # -- time ----------------------------------------------------------------------------------

    def check_progress(self, now: float) -> None:
        """Check that every process that can run has made progress."""
        for witness in self.witnesses:
            limit = STARTING if witness.state == "starts" else PATIENCE
            limit += MEETING if self.plan.joins else 0.0
            if witness.runs and now - witness.progress > limit:
                raise ViolationError(f"{witness.name} hangs: no progress for {now - witness.progress:.1f} s")

    def settle(self) -> None:
        """Begin to count the rounds that are committed without further faults."""
        self.is_settling = True

    @property
    def survivors(self) -> list[Witness]:
        """The processes that take part."""
        return [one for one in self.witnesses if one.is_alive and one.state in ("starts", "member")]

    @property
    def has_settled(self) -> bool:
        """Whether all processes that take part go on together."""
        living = self.survivors
        if self.plan.joins:
            pids = {one.pid for one in living}
            together = (
                len({one.generation for one in living}) == 1
                and all(one.size == len(living) and pids <= one.called_after for one in living)
                and all(one.has_read_after or one.slot == 0 for one in living)
            )
        else:
            together = all(one.state == "member" for one in living)
        return together and all(one.rounds_after.get(one.generation, 0) >= ROUNDS_AFTER for one in living)

    def check_accusations(self, now: float, *, starved: bool) -> None:
        """Check that no process was blamed that could run.

        Args:
            now: The time. A process that could not run says so when it runs again, for which it is given `PATIENCE`.
            starved: Whether some process has logged that it could not run for long.
        """
        if starved:
            self.accusations.clear()
        elif self.accusations and now > self.accusations[0][0] + PATIENCE:
            raise ViolationError(self.accusations[0][1])

    def check_survivors(self, *, starved: bool = False) -> None:
        """Check that those founders go on that must: any of them may be lost that was silent because it could not run."""
        if starved:
            return
        untouched = [one for one in self.witnesses if not one.is_harmed]
        gone = [one for one in self.witnesses if not one.is_alive or one.state in ("leaves", "ended")]
        others = [one for one in self.witnesses if one.was_silent]
        seen = all(any(self.plan.hosts[near.slot] == self.plan.hosts[one.slot] for near in untouched) for one in gone)
        if not others and seen:
            for one in untouched:
                if one.state not in ("member", "leaves", "ended"):
                    raise ViolationError(f"{one.name} has not gone on, although no fault has touched it")
        # A rank that is heard again too early may go on instead of one that has declared it lost.
        elif len(others) == 1 and 2 * len(untouched) > self.plan.size and not self.survivors:
            raise ViolationError("nobody has gone on, although most founders were not touched")
        # Which side of a separation goes on depends on its moment if it is short.
        if len(self._harmful) == 1 and self._harmful[0] in OF_A_HOST and 2 * len(self.survivors) < self.plan.size:
            raise ViolationError("after the separation of the hosts fewer than half of the founders go on")
