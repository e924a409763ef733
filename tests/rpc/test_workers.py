"""Workers under torch's RPC names, as real processes: hybrid training, where they meet, and how they end."""

from pathlib import Path

import pytest

from tests.support.ports import free_port

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).parent / "program_workers.py"


@pytest.fixture
def start(nursery):
    """Start some workers."""

    def start(function, count, *args):
        port = free_port()
        return [nursery.start(PROGRAM, function, rank, port, *args) for rank in range(count)]

    return start


# Each process imports what DistributedDataParallel needs, which takes seconds.
@pytest.mark.exhaustive
def test_two_trainers_train_a_remote_module_and_a_replicated_one(start):
    workers = start("hybrid", 4)
    port = free_port()
    for trainer in workers[:2]:
        trainer.say(port)
    losses = workers[3].hear()
    assert all(each[-1] < each[0] / 2 for each in losses)
    assert workers[3].hear() == 0


def test_workers_meet_in_the_store_of_the_process_group_of_torch(start):
    workers = start("on_one_port", 2)
    assert [[worker.hear(), worker.hear()] for worker in workers] == [[5, 5], [5, 5]]


def test_shutdown_waits_for_calls_that_nobody_awaits(start):
    assert [worker.hear() for worker in start("leave_early", 2)] == [0, 21]


@pytest.mark.parametrize("killed", [0, 2])
def test_shutdown_names_the_worker_that_was_killed(start, killed):
    workers = start("end", 3, 3, 60.0)
    assert [worker.hear() for worker in workers] == ["begun"] * 3
    left = [worker for rank, worker in enumerate(workers) if rank != killed]
    left[0].say(None)
    workers[killed].kill()
    left[1].say(None)
    for worker in left:
        assert worker.hear().startswith(f"PeerLostError: worker 'worker{killed}' was lost (it")


def test_shutdown_has_a_limit(start):
    patient, late = start("end", 2, 2, 0.1)
    assert [patient.hear(), late.hear()] == ["begun", "begun"]
    patient.say(None)
    assert patient.hear().startswith("StoreTimeoutError: ")
    late.say(None)
    assert late.hear().startswith("PeerLostError: worker 'worker0' was lost (")
