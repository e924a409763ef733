"""One and two ranks on one GPU, over the negotiated backend and over the staged one."""

import pytest

from asyncdist_transports.cuda_ipc import CudaIpc

pytestmark = [pytest.mark.gpu, pytest.mark.processes]

CUDA = "cuda:0"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("backend", [None, "cpu:auto,cuda:staged"], ids=["auto", "staged"])
def test_every_operation_equals_the_one_on_the_host(pair, ranks, backend):
    said = pair.run("every_drill", CUDA, backend, ranks=ranks)
    ways = {way for way, _ in said}
    assert len(ways) == 1, f"the ranks chose different backends: {ways}"
    assert ways == {"staged"} or backend is None
    assert all(compared > 500 for _, compared in said)


@pytest.mark.parametrize("ranks", [1, 2])
def test_streams_are_ordered_without_the_host(pair, ranks):
    assert pair.run("streams", CUDA, 100, ranks=ranks) == ["right"] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_loop_runs_while_the_device_works(pair, ranks):
    for ticks, latest in pair.run("ticking", CUDA, ranks=ranks):
        assert ticks >= 10, f"{ticks} ticks, the latest {latest * 1e3:.1f} ms after the one before"


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_may_be_dropped_in_flight(pair, ranks):
    assert pair.run("freed", CUDA, ranks=ranks) == ["right"] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_groups_and_tensors_of_host_and_device(pair, ranks):
    assert pair.run("two_groups", CUDA, ranks=ranks) == ["right"] * ranks


def test_tensors_made_in_inference_mode(pair):
    assert pair.run("made_in_inference_mode", CUDA) == ["right"] * 2


def test_ranks_that_name_the_device_differently(pair):
    """One rank's CUDA_VISIBLE_DEVICES has the device's number, the other one's its identifier."""
    (uuid,) = pair.run("identifier", CUDA, ranks=1)
    visible = [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": f"GPU-{uuid}"}]
    assert pair.run("two_groups", CUDA, environments=visible) == ["right"] * 2


@pytest.mark.parametrize("stock", [False, True], ids=["our DDP", "torch's DDP on our back end"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_equals_that_of_one_process(pair, ranks, stock):
    assert pair.run("training", CUDA, stock, ranks=ranks) == ["right"] * ranks


def test_large_messages_stay_on_the_device(pair):
    for refused, ways in pair.run("messages", CUDA, 50):
        if CudaIpc.probe() is None:
            assert not refused, "ranks on one device can map each other's memory"
            assert "cuda_ipc" in ways


def test_messages_of_many_kinds(pair):
    assert pair.run("messages_of_many_kinds", CUDA) == ["right"] * 2


def test_remote_calls_read_tensors_where_they_lie(pair):
    for lent in pair.run("remote_calls", CUDA, 30):
        assert lent or CudaIpc.probe() is not None, "processes on one device can map each other's memory"


def test_process_killed_while_its_result_is_awaited_is_named(pair):
    survivor, victim = pair.start("left_with_calls", CUDA)
    assert survivor.hear() == "waiting"
    victim.kill()
    assert "tensors.double() at rank 1 (process" in survivor.hear()
    assert survivor.wait() == 0, survivor.output()


@pytest.mark.parametrize("message", [False, True], ids=["all_reduce", "recv"])
@pytest.mark.parametrize("count", [1000, 1_000_000], ids=["staged", "mapped"])
def test_killed_peer_is_named(pair, count, message):
    survivor, victim = pair.start("left_alone", CUDA, count, message)
    assert [one.hear() for one in (survivor, victim)] == ["met", "met"]
    victim.kill()
    peer, words = survivor.hear()
    assert peer == 1, words
    assert survivor.wait() == 0, survivor.output()


@pytest.mark.parametrize("message", [False, True], ids=["all_reduce", "recv"])
def test_no_stream_waits_for_a_killed_process(pair, message):
    survivor, victim = pair.start("left_behind", CUDA, message)
    assert survivor.hear() == "waiting"
    victim.kill()
    peer, words = survivor.hear()
    assert peer == 1, words
    assert survivor.wait() == 0, survivor.output()


def test_rank_without_device_memory_is_named(pair):
    for words in pair.run("out_of_memory", CUDA):
        assert "rank 1" in words
        assert "out of memory" in words
