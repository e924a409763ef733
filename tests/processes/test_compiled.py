"""torch.compile breaks the graph at asyncdist calls and does not trace into them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncdist.testing.processes import Nursery

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]
PROGRAM = Path(__file__).parent / "program_compiled.py"


@pytest.fixture(scope="module")
def nursery():
    with Nursery(("asyncdist.sync", "asyncdist.ddp", "asyncdist_transports.shm", "torch._dynamo")) as nursery:
        yield nursery


@pytest.fixture
def of_two(nursery, tmp_path):
    def run(function, *args):
        """Return what two ranks send of a function of the program."""
        where = f"file://{tmp_path}/{function}{len(args)}{args}"
        ranks = [nursery.start(PROGRAM, function, where, rank, *args) for rank in range(2)]
        return [rank.hear(240) for rank in ranks]

    return run


@pytest.mark.exhaustive
def test_compiled_functions_call_collectives(of_two):
    # Twice 1 + 2 is 6 on both; and their ranks, 0 and 1, make it 13.
    sums = [[13.0 * count - count * rank for rank in range(2)] for count in (4, 4, 8, 5)]
    assert of_two("functions") == [sums] * 2


@pytest.mark.exhaustive
def test_models_compiled_before_and_after_they_are_wrapped(of_two):
    plain, *compiled = (of_two("training", inside) for inside in ("plain", True, False))
    assert plain[0] == plain[1]
    for ranks in compiled:
        assert ranks[0] == ranks[1]
        for ours, theirs in zip(ranks[0], plain[0], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))
