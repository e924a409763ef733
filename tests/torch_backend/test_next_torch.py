"""What torch 2.15 brought: devices of groups, aborted meshes, names in profiles, and its flight recorder on failures."""

import pickle
import signal

import pytest
import torch

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not hasattr(torch.distributed.device_mesh.DeviceMesh, "abort"), reason="torch before 2.15 has none of these"
    ),
]


@pytest.fixture
def begin(start_world):
    """Fork the ranks of a world that run a function of the program: ``begin(function, world)``."""
    return lambda function, world=2, **environment: start_world(
        "programs_next_torch.py", function, world, **environment
    )


def test_group_is_bound_to_a_cpu(begin):
    ranks = begin("on_a_cpu")
    assert [rank.hear() for rank in ranks] == [[3.0, 3.0, 1.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]


def test_mesh_is_aborted_after_the_death_of_a_rank(begin):
    *survivors, victim = ranks = begin("aborts_mesh", 4)
    assert [rank.hear() for rank in ranks] == ["ready"] * 4
    victim.kill()
    assert victim.wait() == -signal.SIGKILL
    for rank in survivors:
        rank.say("abort")
    for number, rank in enumerate(survivors):
        refused, seconds, kinds = rank.hear()
        assert "Call abort() on the root mesh" in refused
        assert seconds < 5
        assert kinds is None if number % 2 == 0 else {"GroupAbortedError", "PeerLostError"} & set(kinds)
        kind, text = rank.hear()
        assert (kind, "Could not resolve the process group" in text) == ("RuntimeError", True)
    for rank in survivors:
        rank.say("end")


def test_profile_shows_operations_by_the_names_that_the_program_gives(begin):
    ranks = begin("named")
    for rank in ranks:
        seen = rank.hear()
        assert (seen["gradients of layer 1"], seen["asyncdist:all_reduce"]) == (1, 1)
        # One is that of torch's handle of a message, which asynchronous operations have.
        assert seen["to the next stage"] == 2
        assert "asyncdist:send" not in seen
        assert "asyncdist:recv" not in seen


@pytest.mark.parametrize(
    ("settings", "is_written"),
    [
        ({"TORCH_FR_DUMP_ON_TIMEOUT": "1"}, True),
        ({"TORCH_FR_BUFFER_SIZE": "50", "TORCH_FR_DUMP_ON_TIMEOUT": "0"}, False),
    ],
)
def test_recorder_of_torch_is_written_when_an_operation_fails(begin, ended, tmp_path, run_python, settings, is_written):
    ranks = begin("fails", TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/torch_rank_", **settings)
    assert [rank.hear() for rank in ranks] == ["OperationTimeoutError", "GroupAbortedError"]
    for rank in ranks:
        # torch asks back ends in Python for no abort hooks. If it does one day, they are unhealthy here.
        assert rank.hear() == {"healthy": True, "unhealthy_backends": []}
    ended(*ranks)
    written = tmp_path / "torch_rank_0"
    assert written.exists() == is_written
    if is_written:
        entries = pickle.loads(written.read_bytes())["entries"]
        assert {entry["profiling_name"] for entry in entries} == {"asyncdist:all_reduce"}
        _, text = run_python("-m", "torch.distributed.flight_recorder.fr_trace", tmp_path, "--prefix", "torch_rank_")
        assert "collective: asyncdist:" in text
        assert "missing ranks: {0}" in text


def test_pipeline_has_a_group_for_each_edge(as_expected):
    as_expected("programs_pipeline", "per_edge")


def test_reduction_of_gradients_is_awaited(as_expected):
    as_expected("programs_sharded", "finalized_awaited")
