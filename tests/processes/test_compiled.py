"""torch.compile breaks the graph at asyncdist calls and does not trace into them."""

from pathlib import Path

import pytest
import torch

from benchmarks.processes import Nursery

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]
PROGRAM = Path(__file__).parent / "program_compiled.py"


@pytest.fixture(scope="module")
def shared_nursery():
    with Nursery(("asyncdist.sync", "asyncdist.ddp", "asyncdist_transports.shm", "torch._dynamo")) as nursery:
        yield nursery


@pytest.fixture
def of_two(nursery, tmp_path):
    def run(function, *args):
        """Run a function of the program on two ranks, and return the value that each sends."""
        where = f"file://{tmp_path}/{function}{len(args)}{args}"
        ranks = [nursery.start(PROGRAM, function, where, rank, *args) for rank in range(2)]
        return [rank.hear(240) for rank in ranks]

    return run


@pytest.mark.exhaustive
def test_compiled_functions_call_collectives(of_two):
    # The first all-reduce sums 2 and 4; the second sums 6 + 0 and 6 + 1.
    sums = [[13.0 * count - count * rank for rank in range(2)] for count in (4, 4, 8, 5)]
    assert of_two("functions") == [sums] * 2


@pytest.mark.exhaustive
def test_models_compiled_before_and_after_they_are_wrapped(of_two):
    plain, *compiled = (of_two("training", inside) for inside in ("plain", True, False))
    assert plain[0] == plain[1]
    for ranks in compiled:
        assert ranks[0] == ranks[1]
        for compiled_weights, weights in zip(ranks[0], plain[0], strict=True):
            torch.testing.assert_close(torch.tensor(compiled_weights), torch.tensor(weights))
