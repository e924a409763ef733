"""The cost of a schedule. `selection.CANDIDATES` has its formula, which tests compare with a simulation in lock step.

Time is counted in *rounds*: in one round every rank that can proceed completes one step. Each field is the sum over the
rounds of the maximum over the ranks, so costs add up along the critical path.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one collective; ``cost_a + cost_b`` is the cost of one after the other.

    Bytes are exact if the tensor divides evenly into its blocks. Otherwise they are those of the next larger such tensor.

    Attributes:
        rounds: Number of sequential rounds.
        messages: Messages of the busiest rank, in or out, whichever are more.
        nbytes: Bytes of the busiest rank, in or out, whichever are more.
        reduced: Bytes that the busiest rank reduces.
    """

    rounds: int = 0
    messages: int = 0
    nbytes: float = 0
    reduced: float = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.rounds + other.rounds,
            self.messages + other.messages,
            self.nbytes + other.nbytes,
            self.reduced + other.reduced,
        )

    def on_shared_cores(self, share: int) -> Cost:
        """Return the cost where each core has ``share`` ranks, all of which do this much."""
        return Cost(self.rounds, self.messages * share, self.nbytes * share, self.reduced * share)


def in_shares(size: int, nbytes: int, *, reduces: bool = False) -> Cost:
    """Return the cost of P-1 rounds, in each of which a rank sends, receives and perhaps reduces 1/P of the tensor."""
    moved = (size - 1) * nbytes / size
    return Cost(size - 1, size - 1, moved, moved * reduces)


def in_one_round(size: int, nbytes: int) -> Cost:
    """Return the cost of one round in which a rank sends or receives P-1 blocks of 1/P of ``nbytes``."""
    return Cost() if size == 1 else Cost(1, size - 1, (size - 1) * nbytes / size)


def in_whole(rounds: int, nbytes: float, *, reduces: bool = False) -> Cost:
    """Return the cost of rounds in each of which a rank sends or receives, and perhaps reduces, the whole tensor."""
    return Cost(rounds, rounds, rounds * nbytes, rounds * nbytes * reduces)
