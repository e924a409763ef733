"""torch's analyser of flight recorder files, ``torchfrtrace``, on the dumps of real ranks."""

import pytest
from click.testing import CliRunner

from asyncdist.cli import main
from tests.processes.conftest import two_are_in_it

pytestmark = [
    pytest.mark.processes,
    pytest.mark.parametrize("combination", [("shm", "blocking")], indirect=True, ids="-".join),
]


@pytest.fixture(params=["written by the ranks", pytest.param("converted", marks=pytest.mark.exhaustive)])
def verdict(request, tmp_path, run_python):
    """Return a function that analyses the dumps: the ranks' own files, or those of ``asyncdist trace --format torch``."""

    def verdict(*options):
        folder = tmp_path / "dumps"
        if request.param == "converted":
            folder = tmp_path / "converted"
            run = CliRunner().invoke(
                main, ["trace", str(tmp_path / "dumps"), "--format", "torch", "--out", str(folder)]
            )
            assert run.exit_code == 0, run.output
            assert f"torchfrtrace {folder} --prefix torch-trace-" in run.output
        return run_python("-m", "torch.distributed.flight_recorder.fr_trace", folder, *options)[1]

    return verdict


@pytest.fixture
def world(job, tmp_path):
    """The commands of three ranks that write their dumps in both formats."""
    return job.world(
        3, ASYNCDIST_DUMP_DIR=str(tmp_path / "dumps"), ASYNCDIST_DUMP_FORMAT="both", ASYNCDIST_DUMP_SIGNAL="USR2"
    )


def test_analyser_names_rank_that_has_not_called(world, all_do, until, tmp_path, verdict):
    all_do(world, "all_reduce", "world", 10)
    for told in world[:2]:
        told.tell("all_reduce", "world", 1000)
    until(lambda: two_are_in_it(world, tmp_path / "dumps"))
    text = verdict()
    for words in (
        "Not all ranks joining collective, sequence number: 2\n", "group info: world:default_pg\n",
        "collective: gloo:all_reduce\n", "missing ranks: {2}\n", "input sizes: [[1000]]\n", "collective state: started\n",
    ):  # fmt: skip
        assert words in text
    world[2].tell("all_reduce", "world", 1000)
    for told in world:
        assert told.hear() == 3.0


@pytest.mark.exhaustive
def test_analyser_names_calls_that_differ(world, all_do, verdict):
    all_do(world, "all_reduce", "world", 10)
    for told in world[:2]:
        told.tell("all_reduce", "world", 1000)
    world[2].tell("broadcast", "world", 1000, 0, 1)
    for told in world:
        assert told.hear().kind == "MismatchError"
    text = verdict()
    assert "Collective sequence number: 2 has errors" in text
    assert "Error type: COLLECTIVE_TYPE_MISMATCH" in text
    assert "'broadcast'" in text
    assert "'all_reduce'" in text


@pytest.mark.exhaustive
def test_analyser_names_rank_without_dump(world, all_do, verdict):
    all_do(world, "all_reduce", "world", 10)
    for told in world[:2]:
        told.tell("all_reduce", "world", 1000)
    world[2].process.kill()
    for told in world[:2]:
        assert told.hear().kind == "PeerLostError"
    assert "Missing dump files from ranks {2}" in verdict()
    assert "we missed FR dumps from ranks ({2})" in verdict("--allow-incomplete-ranks")
