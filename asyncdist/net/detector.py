"""Decides from missing heartbeats which peers are suspected, and which are lost.

Every rank beats `BEATS` times within the timeout, and looks for the beats of its peers as often. A peer is suspected after
0.7 of the timeout without a sign of life, and lost after all of it. See T. D. Chandra and S. Toueg, "Unreliable Failure
Detectors for Reliable Distributed Systems", JACM 43(2), 1996.

If a host vanishes, all its ranks fall silent within one period, and a rank that has lost one of them, or hears that another
rank has, loses the others with it: each look that came later for one of them would delay those that go on. To many of
them this rank has no connection. It makes one when it asks them about the suspect. A host that lives accepts the connection
at once, even if the process is stopped. So a peer counts as silent for as long as a rank of its host is, if that host
does not accept.

The time of a look counts only up to one and a half periods. A rank that was stopped, or that gets no processor, therefore
blames no rank for what it has missed itself.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

BEATS = 10
"""The heartbeats within the timeout."""
_LONGEST_STEP = 1.5
"""The periods that count of the time between two looks."""
SUSPECTED_AFTER = 0.7
"""The part of the timeout after which a silent peer is suspected."""
_COMPANY = 1.5
"""The periods before the end of the timeout from which on a silent peer is lost with the other ranks of its host."""
_MOST_EXCUSED = 11.0
"""The timeouts by which excuses delay the loss of a silent peer."""


class Liveness(enum.Enum):
    SUSPECTED = "suspected"
    RECOVERED = "recovered"
    LOST = "lost"


class Verdict(NamedTuple):
    """A change of one peer, ``silence`` seconds after its last sign of life.

    ``heard_by`` are the ranks that have heard it since it was suspected, ``unheard_by`` those that do not hear it either.
    ``is_alone`` says that this rank hears no peer at all, and has several.
    """

    liveness: Liveness
    peer: int
    silence: float
    heard_by: tuple[int, ...] = ()
    unheard_by: tuple[int, ...] = ()
    is_alone: bool = False


@dataclass(slots=True)
class _Watched:
    """A peer: when it was last heard, on the clock of the caller and on that of the detector, and what others say.

    The times of a peer that ``is_unanswered`` are those of another rank of its host.
    """

    heard_at: float
    heard: float
    was_heard: bool = False
    is_unanswered: bool = False
    excused: float = 0.0
    is_suspected: bool = False
    answers: dict[int, bool] = field(default_factory=dict)


class Detector:
    """The detector of one rank for the peers of one transport.

    A peer is lost after ``timeout`` seconds of silence. ``company`` returns the ranks on its host, itself included.
    """

    def __init__(self, timeout: float, company: Callable[[int], Iterable[int]] = lambda peer: ()) -> None:
        self._timeout, self._period, self._company = timeout, timeout / BEATS, company
        self._now: float | None = None
        self._clock = 0.0
        self._peers: dict[int, _Watched] = {}
        self._gone: dict[int, _Watched] = {}
        """The peers that this rank or another has lost because they were silent."""

    @property
    def peers(self) -> list[int]:
        return list(self._peers)

    @property
    def suspects(self) -> list[int]:
        return [peer for peer, watched in self._peers.items() if watched.is_suspected]

    def silence(self, peer: int) -> float | None:
        """Return the seconds for which a peer has been silent at the last look; None if it is not watched."""
        watched = self._peers.get(peer)
        return None if watched is None or self._now is None else self._now - watched.heard_at

    def hears(self, peer: int) -> bool:
        """Return whether a peer has been heard since it is watched, and is not suspected."""
        watched = self._peers.get(peer)
        return watched is not None and watched.was_heard and not watched.is_suspected

    def last_heard(self) -> dict[int, float]:
        """Return the times at which the watched peers were last heard, on the clock of `look`."""
        return {peer: watched.heard_at for peer, watched in list(self._peers.items())}

    def look(
        self,
        now: float,
        heard: Mapping[int, bool],
        lost_elsewhere: Set[int] = frozenset(),
        unanswered: Set[int] = frozenset(),
    ) -> list[Verdict]:
        """Note who was heard since the last look, and return what has changed.

        Args:
            now: The time on a monotonic clock.
            heard: The peers whose beats reach this rank as long as they live, and whether each was heard. The detector
                watches a peer from the first look that names it, and forgets it at the first that does not.
            lost_elsewhere: Peers that another rank has just lost because they were silent.
            unanswered: Peers whose host does not accept a connection.
        """
        step = 0.0 if self._now is None else now - self._now
        self._now, self._clock = now, self._clock + min(step, _LONGEST_STEP * self._period)
        verdicts = []
        for peer in lost_elsewhere:
            self._gone.setdefault(peer, _Watched(now - self._timeout, self._clock - self._timeout))
        heard = self._with_unanswered(heard, unanswered)
        for peer in self._peers.keys() - heard.keys():
            del self._peers[peer]
        for peer, is_heard in heard.items():
            watched = self._peers.get(peer)
            if watched is None or is_heard:
                if watched is not None and watched.is_suspected:
                    verdicts.append(Verdict(Liveness.RECOVERED, peer, now - watched.heard_at))
                self._peers[peer] = _Watched(now, self._clock, is_heard)
            elif self._clock - watched.heard >= self._timeout - self._period / 2:
                verdicts.append(self._lost(peer, watched))
            elif not watched.is_suspected and self._clock - watched.heard >= self._suspected_after:
                watched.is_suspected = True
                verdicts.append(Verdict(Liveness.SUSPECTED, peer, now - watched.heard_at))
        lost = {verdict.peer for verdict in verdicts if verdict.liveness is Liveness.LOST}
        for peer in sorted(self._lost_in_company(lost | lost_elsewhere) - lost):
            verdicts.append(self._lost(peer, self._peers[peer]))
            lost.add(peer)
        for peer in lost:
            self._gone[peer] = self._peers.pop(peer)
        return verdicts

    def _with_unanswered(self, heard: Mapping[int, bool], unanswered: Set[int]) -> Mapping[int, bool]:
        """Watch the unanswered peers of silent hosts, and return ``heard`` with them."""
        found = dict(heard)
        for peer in {*unanswered, *(peer for peer, watched in self._peers.items() if watched.is_unanswered)}:
            mates = (self._mate(other, heard) for other in self._company(peer) if other != peer)
            mate = next((each for each in mates if each is not None), None) if peer in unanswered else None
            watched = self._peers.get(peer)
            if mate is not None and watched is None:
                self._peers[peer] = _Watched(mate.heard_at, mate.heard, is_unanswered=True)
                found.setdefault(peer, False)
            elif mate is not None and watched is not None and watched.is_unanswered:
                found.setdefault(peer, False)
            elif watched is not None and watched.is_unanswered:
                del self._peers[peer]
        return found

    def _mate(self, peer: int, heard: Mapping[int, bool]) -> _Watched | None:
        """Return a peer that has answered this rank, if it is silent or gone."""
        watched = self._peers.get(peer)
        if watched is None:
            return self._gone.get(peer)
        return watched if watched.is_suspected and not watched.is_unanswered and not heard.get(peer) else None

    def _lost_in_company(self, lost: Set[int]) -> set[int]:
        """Return the peers that are lost with others, because their whole host is silent, and they nearly long enough."""
        found: set[int] = set()
        for peer in lost:
            others = {other: self._peers[other] for other in self._company(peer) if other in self._peers}
            if all(watched.is_suspected for watched in others.values()):
                enough = self._timeout - _COMPANY * self._period
                found.update(other for other, watched in others.items() if self._clock - watched.heard >= enough)
        return found

    def excuse(self, peer: int, *, without_limit: bool = False) -> None:
        """Delay the loss of a suspect, because another rank sees that its process works and only cannot beat.

        The delays of one silence end after some timeouts, unless ``without_limit``.
        """
        watched = self._peers.get(peer)
        if watched is not None and watched.is_suspected:
            delay = max(0.0, self._clock - watched.heard - self._suspected_after)
            if not without_limit:
                delay = min(delay, _MOST_EXCUSED * self._timeout - watched.excused)
                watched.excused += delay
            watched.heard += delay

    def answer(self, peer: int, witness: int, *, is_heard: bool) -> None:
        """Note whether another rank hears a suspect."""
        watched = self._peers.get(peer)
        if watched is not None and watched.is_suspected:
            watched.answers[witness] = is_heard

    @property
    def _suspected_after(self) -> float:
        return SUSPECTED_AFTER * self._timeout - self._period / 2

    def _lost(self, peer: int, watched: _Watched) -> Verdict:
        silent = [other.is_suspected for other in self._peers.values()]
        return Verdict(
            Liveness.LOST,
            peer,
            (self._now or 0.0) - watched.heard_at,
            tuple(sorted(witness for witness, is_heard in watched.answers.items() if is_heard)),
            tuple(sorted(witness for witness, is_heard in watched.answers.items() if not is_heard)),
            len(silent) > 1 and all(silent),
        )
