"""Select the schedule of a collective by size: the cheapest one in a small performance model.

The model (Hockney's latency and bandwidth, with Thakur, Rabenseifner and Gropp's term for reduction and LogP's overhead
per message) predicts the time of a schedule from its `Cost`:

    seconds = alpha * rounds + overhead * messages + beta * nbytes + gamma * reduced

Each rank chooses for itself and all ranks must agree, so the inputs are equal on all ranks. ``nbytes`` is the size of all
blocks of a rank together: of the tensor in all_reduce, reduce and broadcast, of the gathered or scattered tensors, of
one side of an all_to_all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from asyncdist.config import Config
from asyncdist.errors import UsageError
from asyncdist.kernel.algorithms import recursive_doubling, tree
from asyncdist.kernel.algorithms.cost import Cost, in_one_round, in_shares, in_whole
from asyncdist.kernel.algorithms.schedule import CROWD


@dataclass(frozen=True, slots=True)
class Model:
    """Seconds per round (alpha), byte moved (beta), byte reduced (gamma) and message; bytes of a segment of a chain.

    The defaults were fitted to two processes and non-blocking sockets over loopback TCP: k messages each way in a round
    take 4 + 6 k microseconds (plus the framing of asyncdist), a byte each way 0.3 to 0.4 ns, a byte of float32 added
    in cache 0.02 to 0.05 ns. The choice depends on the ratios of these values, which vary less between machines. Between
    hosts, measured values replace them (`asyncdist.groups.calibration`); ``source`` says where the values are from.
    ``cores`` is the number that all ranks share; 0 if they are on several hosts.
    """

    alpha: float = 5e-6
    beta: float = 0.35e-9
    gamma: float = 0.04e-9
    overhead: float = 7e-6
    segment_nbytes: int = 1 << 20
    cores: int = 0
    source: str = "the defaults, which were fitted to TCP within one machine"

    def share(self, size: int) -> int:
        """Return the ranks for each core, which take turns, if the ranks of a group crowd their host; else 1."""
        return max(1, size // self.cores) if self.cores and size > CROWD else 1

    def seconds(self, cost: Cost) -> float:
        """Return the predicted time of a schedule."""
        return (
            self.alpha * cost.rounds
            + self.overhead * cost.messages
            + self.beta * cost.nbytes
            + self.gamma * cost.reduced
        )


DEFAULT = Model()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One schedule for a collective, with its cost for a size, a number of bytes and a model, and its requirements.

    ``contiguous`` says that it uses runs of blocks as one place, so the blocks must be contiguous in memory. ``sends_sums``
    says that it sends partial sums, whose dtype may be wider than that of the tensor.
    """

    name: str
    cost: Callable[[int, int, Model], Cost]
    contiguous: bool = False
    power_of_two: bool = False
    sends_sums: bool = False

    def applies(self, size: int, contiguous: bool) -> bool:
        """Return whether the schedule can run among ``size`` ranks, over contiguous or separate blocks."""
        if self.contiguous and not contiguous:
            return False
        return not self.power_of_two or size == recursive_doubling.floor_power_of_two(size)


def _tree_rounds(size: int) -> int:
    """Return ceil(log2 P), the rounds of a binomial tree and of dissemination."""
    return (size - 1).bit_length()


def _of_all(cost: Callable[[int, int], Cost]) -> Callable[[int, int, Model], Cost]:
    """Return the cost of a schedule in which all ranks do as much, and take turns if they share cores."""
    return lambda size, nbytes, model: cost(size, nbytes).on_shared_cores(model.share(size))


def _there_and_back(size: int, nbytes: int, model: Model) -> Cost:
    """Return the cost of a reduce to one rank and a broadcast along a tree, in which most ranks do little."""
    rounds = _tree_rounds(size)
    times = max(rounds, model.share(size)) if rounds else 0
    return Cost(2 * rounds, 2 * times, 2 * times * nbytes, times * nbytes)


# Among equal costs the first is chosen. The first schedule of each collective always applies.
CANDIDATES: Mapping[str, tuple[Candidate, ...]] = {
    "all_reduce": (
        Candidate("doubling", _of_all(lambda p, n: recursive_doubling.all_reduce_cost(p, n)), sends_sums=True),
        Candidate("ring", _of_all(lambda p, n: in_shares(p, n, reduces=True) + in_shares(p, n))),
        Candidate("halving", _of_all(lambda p, n: recursive_doubling.halving_all_reduce_cost(p, n)), contiguous=True),
        Candidate("tree", _there_and_back, sends_sums=True),
    ),
    "broadcast": (
        Candidate("tree", lambda p, n, _: in_whole(_tree_rounds(p), n)),
        Candidate(
            "chain",
            lambda p, n, model: tree.chain_broadcast_cost(p, n, tree.segment_count(n, model.segment_nbytes)),
        ),
    ),
    "reduce": (
        Candidate("tree", lambda p, n, _: in_whole(_tree_rounds(p), n, reduces=True)),
        Candidate("pairwise", lambda p, n, _: in_shares(p, n, reduces=True) + in_one_round(p, n)),
    ),
    "all_gather": (
        Candidate("direct", lambda p, n, _: in_one_round(p, n)),
        Candidate("ring", lambda p, n, _: in_shares(p, n)),
        Candidate(
            "doubling",
            lambda p, n, _: Cost(_tree_rounds(p), _tree_rounds(p), (p - 1) * n / p),
            contiguous=True,
            power_of_two=True,
        ),
    ),
    "reduce_scatter": (Candidate("pairwise", lambda p, n, _: in_shares(p, n, reduces=True)),),
    "all_to_all": (Candidate("pairwise", lambda p, n, _: in_shares(p, n)),),
    "gather": (Candidate("star", lambda p, n, _: in_one_round(p, n)),),
    "scatter": (Candidate("star", lambda p, n, _: in_one_round(p, n)),),
    "barrier": (
        Candidate("dissemination", _of_all(lambda p, _: in_whole(_tree_rounds(p), 0))),
        Candidate("tree", lambda p, _, model: _there_and_back(p, 0, model)),
    ),
}


def choose(
    collective: str,
    nbytes: int,
    size: int,
    *,
    model: Model = DEFAULT,
    forced: Mapping[str, str] | None = None,
    contiguous: bool = True,
    widening: int = 1,
) -> str:
    """Return the name of the schedule to run.

    A forced schedule (`forced_by`) is used if its `Candidate` applies; otherwise the model chooses. ``widening`` is the
    size of partial sums divided by that of the tensor. Raises ValueError for a collective that is not in `CANDIDATES`.
    Arguments must be equal on all ranks.
    """
    name = forced.get(collective) if forced else None
    if name is not None and _candidate(collective, name).applies(size, contiguous):
        return name
    applicable = [candidate for candidate in candidates(collective) if candidate.applies(size, contiguous)]

    def seconds(candidate: Candidate) -> float:
        return model.seconds(candidate.cost(size, nbytes * widening if candidate.sends_sums else nbytes, model))

    return min(applicable, key=seconds).name


def candidates(collective: str) -> tuple[Candidate, ...]:
    """Return the schedules for a collective. Raises ValueError, which lists the collectives, for an unknown one."""
    try:
        return CANDIDATES[collective]
    except KeyError:
        raise ValueError(f"there is no collective {collective!r}; there are {', '.join(CANDIDATES)}") from None


def _candidate(collective: str, name: str) -> Candidate:
    for candidate in candidates(collective):
        if candidate.name == name:
            return candidate
    names = ", ".join(candidate.name for candidate in candidates(collective))
    raise ValueError(f"there is no schedule {name!r} for {collective}; there are {names}")


def forced_by(config: Config) -> dict[str, str]:
    """Return the schedules that ASYNCDIST_ALGORITHM forces, as in ``all_reduce=ring,broadcast=tree``, by collective.

    Raises UsageError, which names the possible values, for an unknown collective or schedule.
    """
    forced: dict[str, str] = {}
    try:
        for entry in filter(None, (part.strip() for part in config.algorithm.split(","))):
            collective, equals, name = (part.strip() for part in entry.partition("="))
            if not equals:
                raise ValueError(f"{entry!r} is not of the form collective=schedule, as in all_reduce=ring")
            if collective in forced:
                raise ValueError(f"{collective} is given twice, as {forced[collective]} and as {name}")
            forced[collective] = _candidate(collective, name).name
    except ValueError as error:
        raise UsageError(f"ASYNCDIST_ALGORITHM={config.algorithm!r}: {error}") from None
    return forced


class SelectionRow(NamedTuple):
    """The model's prediction for one size: ``microseconds`` by schedule, None for a schedule that cannot run."""

    nbytes: int
    chosen: str
    microseconds: dict[str, float | None]


def explain(
    collective: str,
    size: int,
    sizes: Iterable[int],
    *,
    model: Model = DEFAULT,
    forced: Mapping[str, str] | None = None,
) -> list[SelectionRow]:
    """Return the choice of `choose`, and the predictions behind it, for each of ``sizes`` in bytes."""
    return [
        SelectionRow(
            nbytes,
            choose(collective, nbytes, size, model=model, forced=forced),
            {
                candidate.name: model.seconds(candidate.cost(size, nbytes, model)) * 1e6
                if candidate.applies(size, contiguous=True)
                else None
                for candidate in candidates(collective)
            },
        )
        for nbytes in sizes
    ]
