"""Programs at random on asyncdist and on others: ``python tests/differences/hunt.py [--seconds 60]``; `make differences`.

Every program runs on asyncdist over shared memory and over TCP, on gloo or torch's stores, and on MPI where it is found
(``--mpi``); numpy says what is right.
A program on which asyncdist is wrong is made smaller and printed, and the status is 1. The rest is a table, and a list of
what others give wrong or refuse, by kind, in ``out/differences.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import pickle
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from benchmarks.processes import Nursery, RankEndedError, RankProcess  # noqa: E402
from tests.differences import reference, store_calls  # noqa: E402
from tests.differences.mpi import MpiContender, found  # noqa: E402
from tests.differences.programs import WORLD, StoreProgram, Training, collectives, shares_memory, stores, trainings  # noqa: E402
from tests.differences.reference import Verdict  # noqa: E402
from tests.differences.rows import ROWS  # noqa: E402
from tests.differences.rows.row import Row  # noqa: E402

MODULES = ("torch", "torch.nn.parallel", "asyncdist.sync", "asyncdist.ddp", "asyncdist.torch_backend",
           "asyncdist_transports.shm", "asyncdist_transports.tcp", "torch._dynamo",
           "tests.differences.training", "tests.differences.rows")  # fmt: skip
_LIMITS = {"asyncdist": 20.0, "gloo": 1.5}
"""Seconds after which a collective fails."""
KINDS = {"collectives": (collectives, 5), "training": (trainings(), 1), "stores": (stores, 3)}
"""What is drawn, and in how many of so many chunks."""


class Contender:
    """The ranks of one back end. They live until a program hangs or breaks their connections."""

    def __init__(self, name: str, nursery: Nursery, folder: Path, backend: str, **environment: str) -> None:
        self.name, self._is_ours, self._limit = name, backend == "asyncdist", _LIMITS[backend]
        self._start = lambda rank, meeting: nursery.start(
            HERE / "program_rank.py", "serve", backend, rank, WORLD, f"file://{folder}/{meeting}", self._limit,
            environment={"GLOO_SOCKET_IFNAME": "lo", **environment},
        )  # fmt: skip
        self._meetings = itertools.count()
        self._ranks: list[RankProcess] = []
        self.replace()

    def replace(self) -> None:
        """Kill the ranks and start new ones."""
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.kill()
            rank.wait()
            rank.close()
        meeting = f"{self.name}-{next(self._meetings)}"
        self._ranks = [self._start(rank, meeting) for rank in range(WORLD)]

    def words(self, name: str) -> str:
        """Run a row of the page; return what it says on the ranks together."""
        found = self._found(name)
        if ROWS[name].spoils_ranks:
            self.replace()
        said = sorted({str(each) for each in found if each})
        return said[0] if len(said) == 1 else f"rank 0: {found[0]}; rank 1: {found[1]}"

    def _found(self, name: str, *, again: bool = True) -> list[Any]:
        for rank in self._ranks:
            rank.say(name)
        try:
            return [_words_of(rank, ROWS[name]) for rank in self._ranks]
        except TimeoutError:
            self.replace()
            # gloo hangs now and then when its limits pass on a machine with far more work than cores.
            if self._is_ours or not again:
                raise
        return self._found(name, again=False)

    def run(self, program: Any) -> Verdict:
        """Run a program and judge its outcome."""
        if not self._is_ours and shares_memory(program):
            return reference.LEFT_OUT
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.say(program)
        try:
            answers = [rank.hear(2 * self._limit) for rank in self._ranks]
        except (RankEndedError, TimeoutError) as error:
            verdict = Verdict("hung", str(error))
        else:
            outcomes = [pickle.loads(answer) for answer in answers]
            verdict = reference.judge(program, outcomes, strict=self._is_ours)
            if reference.is_together(program, outcomes):
                return verdict
        self.replace()
        return verdict


def _words_of(rank: RankProcess, row: Row) -> Any:
    """Return what a rank says in a row: nothing if the row has killed it."""
    try:
        return pickle.loads(rank.hear(60.0))
    except RankEndedError:
        if row.spoils_ranks and rank.wait() == -signal.SIGKILL:
            return ""
        raise


class StoreContender:
    """A kind of store: one that is emptied after each program, and replaced where it has lost its connection."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name, self._make = name, make
        self._client = make()

    def run(self, program: StoreProgram) -> Verdict:
        """Run a program and judge its answers."""
        verdict = store_calls.judge(program, store_calls.run(program, self._client))
        try:
            store_calls.empty(self._client)
        except Exception:
            self.close()
            self._client = self._make()
        return verdict

    def close(self) -> None:
        """Close the store."""
        if hasattr(self._client, "close"):
            self._client.close()
        del self._client


class Tally:
    """What came out, by kind of program and by outcome."""

    def __init__(self) -> None:
        self.programs: Counter[str] = Counter()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.examples: dict[tuple[str, str, str], tuple[int, str]] = {}

    def add(self, kind: str, program: Any, verdicts: dict[str, Verdict]) -> None:
        """Count a program."""
        self.programs[kind] += 1
        ours = [verdict for name, verdict in verdicts.items() if name.startswith("asyncdist")]
        others = {name: verdict for name, verdict in verdicts.items() if not name.startswith("asyncdist")}
        outcome = "equal"
        if any(verdict.kind in FAULTS for verdict in ours):
            outcome = "asyncdist wrong"
        elif any(verdict.kind == "refused" for verdict in ours):
            outcome = "asyncdist refuses by name"
        elif any(verdict.kind in ("wrong", "hung") for verdict in others.values()):
            outcome = "another is wrong"
        elif any(verdict.kind in ("refused", "unnamed") for verdict in others.values()):
            outcome = "another refuses"
        self.outcomes[kind, outcome] += 1
        for name, verdict in verdicts.items():
            if verdict.kind not in ("right", "left out"):
                key = name, verdict.kind, _shape_of(verdict.why)
                count, example = self.examples.get(key, (0, f"{verdict.why}\n    {program}"))
                self.examples[key] = count + 1, example

    def table(self) -> str:
        """Return the outcomes as text."""
        columns = ("equal", "another refuses", "another is wrong", "asyncdist refuses by name", "asyncdist wrong")
        lines = [f"{'':12} {'programs':>9} " + " ".join(f"{column:>{max(9, len(column))}}" for column in columns)]
        for kind, count in self.programs.items():
            cells = (f"{self.outcomes[kind, column]:>{max(9, len(column))}}" for column in columns)
            lines.append(f"{kind:12} {count:>9} " + " ".join(cells))
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Write what was not right, the most frequent first, with an example of each."""
        path.parent.mkdir(parents=True, exist_ok=True)
        found = sorted(self.examples.items(), key=lambda item: (item[0][0], -item[1][0]))
        rows = [
            {"who": who, "how": how, "what": what, "times": times, "example": example}
            for (who, how, what), (times, example) in found
        ]
        path.write_text(
            json.dumps({"torch": torch.__version__, "programs": self.programs, "found": rows}, indent=1) + "\n"
        )


def _shape_of(why: str) -> str:
    """Return a text without its numbers, so that equal faults count as one."""
    return "".join("#" if letter.isdigit() else letter for letter in why[:160])


FAULTS = ("wrong", "unnamed", "hung")


class OursIsWrong(AssertionError):
    """Asyncdist gave a wrong result, an error without a name, or none."""


@contextlib.contextmanager
def contenders(folder: Path, mpi_python: str | None = None) -> Iterator[dict[type, list[Any]]]:
    """Start all contenders; yield those for each type of program."""
    with Nursery(MODULES) as nursery:
        worlds = [
            Contender("asyncdist-shm", nursery, folder, "asyncdist", ASYNCDIST_TRANSPORT="shm"),
            Contender("asyncdist-tcp", nursery, folder, "asyncdist", ASYNCDIST_TRANSPORT="tcp"),
            Contender("gloo", nursery, folder, "gloo"),
        ]
        shops = [StoreContender(name, make) for name, make in store_calls.clients().items()]
        mpi = [MpiContender(*each) for each in [found(mpi_python)] if each is not None]
        print("MPI takes part" if mpi else "without MPI: no mpi4py with an mpirun was found", flush=True)
        try:
            yield {StoreProgram: shops, Training: worlds, object: [*worlds, *mpi]}
        finally:
            for each in [*shops, *mpi]:
                each.close()


def contest(program: Any, rivals: dict[type, list[Any]]) -> dict[str, Verdict]:
    """Run a program on all contenders."""
    return {rival.name: rival.run(program) for rival in rivals.get(type(program), rivals[object])}


def hunt(kind: str, rivals: dict[type, list[Any]], tally: Tally, *, examples: int, seed: int, until: float) -> None:
    """Draw programs of a kind until ``until``. Raises OursIsWrong for the smallest program found."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    @hypothesis.given(KINDS[kind][0])
    def draw(program: Any) -> None:
        if time.monotonic() > until:
            return
        verdicts = contest(program, rivals)
        tally.add(kind, program, verdicts)
        for name, verdict in verdicts.items():
            if name.startswith("asyncdist") and verdict.kind in FAULTS:
                raise OursIsWrong(f"{name} is {verdict.kind}: {verdict.why}\n{program}")

    draw()


def main() -> int:
    """Hunt, print the table, and return the number of kinds in which asyncdist was wrong."""
    parser = argparse.ArgumentParser(description="Run programs at random on asyncdist and on others, and compare.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first chunk (default: random)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of " + ", ".join(KINDS))
    parser.add_argument("--examples", type=int, default=200, help="programs of one kind in a row: a chunk")
    parser.add_argument("--chunks", type=int, default=None, help="end after so many, also before the time is over")
    parser.add_argument("--mpi", default=None, help="a Python that has mpi4py, with mpirun beside it or in PATH")
    parser.add_argument("--out", type=Path, default=Path("out/differences.json"))
    given = parser.parse_args()
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    turns = itertools.cycle([kind for kind in given.kinds.split(",") for _ in range(KINDS[kind][1])])
    tally, failures, until = Tally(), 0, time.monotonic() + given.seconds
    shown = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contenders(Path(folder), given.mpi) as rivals:
        for number in itertools.count():
            if time.monotonic() > until or number == given.chunks:
                break
            kind = next(turns)
            try:
                hunt(kind, rivals, tally, examples=given.examples, seed=seed, until=until)
            except (OursIsWrong, hypothesis.errors.Flaky) as wrong:
                failures += 1
                because = "".join(f"\n  {cause!r}" for cause in getattr(wrong, "exceptions", ()))
                print(f"\nWRONG, {kind}, seed {seed}: {wrong}{because}\n", flush=True)
            seed += 1
            if time.monotonic() > shown + 30:
                shown = time.monotonic()
                print(f"{max(0, until - shown):5.0f} s left, {sum(tally.programs.values())} programs", flush=True)
    print(tally.table())
    tally.write(given.out)
    print(f"what was refused or wrong: {given.out}")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
