"""asyncdist as a back end of torch in Python (torch 2.14 and later): parts of process groups, and groups made of groups."""

import pytest
import torch

from asyncdist.torch_backend.torch_group import HAS_PYTHON_BACKENDS

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="torch before 2.14 has no back ends in Python"),
]

needs_torch = pytest.mark.skipif(
    not hasattr(torch.distributed.device_mesh.DeviceMesh, "abort"),
    reason="torch 2.14 splits groups of GPUs only, and records no call of a back end in Python",
)


@pytest.fixture
def start(start_world):
    """Fork the ranks of a world that run a function of the program: ``start(function, *arguments)``."""

    def start(function, *arguments, world=2, **environment):
        return start_world("programs_backend.py", function, world, *arguments, **environment)

    return start


def check(results):
    for actual, expected in results:
        assert actual == expected


@needs_torch
@pytest.mark.parametrize(
    ("config", "transport"),
    [
        ("cpu:asyncdist,cuda:gloo", "shm"),
        pytest.param("cpu:asyncdist,cuda:gloo", "tcp", marks=pytest.mark.exhaustive),
        ("cuda:gloo,cpu:asyncdist", "tcp"),
    ],
)
def test_process_group_has_another_back_end_for_another_device(start, config, transport):
    ranks = start("mixed", config, ASYNCDIST_TRANSPORT=transport, GLOO_SOCKET_IFNAME="lo")
    for rank in ranks:
        assert rank.hear() == ["ProcessGroup", "Backend", "ProcessGroupGloo"]
        assert rank.hear() == (True, 1, config, config)
        check(rank.hear())
        assert rank.hear() == (True, True, 2, False)
    kinds, text = ranks[1].hear()
    assert "UnsupportedError" in kinds, text
    assert "give every rank a list" in text


def test_back_end_is_nested_in_a_process_group_of_the_program(start):
    ranks = start("nested", world=3)
    for number, rank in enumerate(ranks):
        assert rank.hear() == (number, 3, 6.0, (number - 1) % 3)


@needs_torch
def test_groups_are_split_in_any_order_and_nested(start):
    ranks = start("splits", world=4)
    for number, rank in enumerate(ranks):
        assert rank.hear() == [True, True, number < 3]
        half = [1, 0] if number < 2 else [3, 2]
        assert rank.hear() == (half.index(number), 30.0, "half", half)
        check(rank.hear())
        assert rank.hear() == 4.0


def test_worlds_are_merged(start, tmp_path):
    ranks = start("merges", str(tmp_path / "store"), world=3)
    for rank in ranks:
        assert rank.hear() == (True, 3, 6.0, "all", "merged")


@needs_torch
def test_destroyed_groups_are_freed(start):
    ranks = start("forgets")
    for rank in ranks:
        assert rank.hear() == [True] * 6


def test_abort_is_seen_by_hooks_and_pending_works(start):
    aborting, *waiting = ranks = start("aborts", world=3)
    for rank in ranks:
        assert rank.hear() == (True, [], "SUCCESS", "SUCCESS")
    assert [rank.hear() for rank in waiting] == ["waiting"] * 2
    aborting.say("abort")
    for rank in waiting:
        assert rank.hear() == ("GroupAbortedError", True, True)
        assert rank.hear() == (["REMOTE_ERROR"], "REMOTE_ERROR", "REMOTE_ERROR")
    assert aborting.hear() == "GroupAbortedError"
    called, *errors = aborting.hear()
    # The hook ran before the abort, and again with the call that failed.
    assert called[0] == "SUCCESS"
    assert errors == ["REMOTE_ERROR", "REMOTE_ERROR"]
    for rank in ranks:
        rank.say("end")


def test_timeout_calls_the_abort_hook(start):
    ranks = start("times_out")
    assert ranks[0].hear() == "OperationTimeoutError"
    assert ranks[0].hear() == (["called"], "TIMEOUT")
    called, error = ranks[1].hear()
    # It has made no call that could fail.
    assert (called, error) == ([], "REMOTE_ERROR")


@needs_torch
def test_hooks_of_torch_see_each_operation(start):
    ranks = start("observes", TORCH_FR_BUFFER_SIZE="100", TORCH_DIST_NAN_CHECK="1")
    for rank in ranks:
        check(rank.hear())
        recorded, before = rank.hear()
        assert recorded[:4] == ["asyncdist:all_reduce"] * 2 + ["asyncdist:broadcast", "asyncdist:_all_gather_base"]
        assert {"ALLREDUCE", "BROADCAST", "BARRIER", "SEND", "RECV", "REDUCE_SCATTER_BASE"} <= set(before)
        _, text = rank.hear()
        assert "NaN" in text
        assert rank.hear() == (True, True, True)


def test_recorder_of_torch_does_not_slow_down_the_idle_back_end_of_the_benchmark(start):
    ranks = start("idles")
    for number, rank in enumerate(ranks):
        assert rank.hear() == (True, True, number)


def test_completion_hook_learns_of_each_operation(start):
    ranks = start("completes")
    for rank in ranks:
        assert rank.hear() == [("ALLREDUCE", 1, True), ("_ALLGATHER_BASE", 2, True)]
