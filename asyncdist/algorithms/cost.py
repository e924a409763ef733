"""What a schedule promises. The formulas stand beside the algorithms; tests hold the algorithms to them.

Time is counted as if all ranks went in lock step, in *rounds*: in one round every rank that can go on sends and
receives what its step asks for. Each field is a sum over the rounds of what the busiest rank does in that round, so
that the fields add up along the path that decides when the last rank is done.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """The price of one collective among ``size`` ranks; ``cost_a + cost_b`` is one after the other.

    ``rounds`` that follow upon each other; ``messages`` and ``nbytes`` through the busiest rank, in or out, whichever
    is more; ``reduced``, the bytes that the busiest rank folds into others. Bytes are exact where a tensor divides into
    its blocks and, where it does not, hold for the next larger one that does.
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
