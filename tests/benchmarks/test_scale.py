"""The benchmark of growing worlds: a short run with real worlds, and the simulation."""

import asyncio

import pytest

from asyncdist.config import Config
from asyncdist.kernel.engine import agreements
from asyncdist.rendezvous import BLOCK
from benchmarks.scale import virtual_time
from benchmarks.scale.benchmark import ScaleBenchmark, ScalePlan
from benchmarks.scale.cluster import Cluster, Costs, Shape
from benchmarks.scale.simulation import simulate

COSTS = Costs(latency=1.0, bandwidth=100.0)


@pytest.mark.processes
def test_store_sends_far_less_than_all_introductions_to_all_ranks():
    size = BLOCK + 2
    report = ScaleBenchmark.run(ScalePlan(parts=("tasks",), ranks=(2, size), barriers=2, rounds=1))
    small, large = report.cases
    introduction = small.median("asyncdist", "most_read") / 4
    assert introduction * size < large.median("asyncdist", "sent") < introduction * size**2 / 4
    for case in report.cases:
        assert case.median("asyncdist", "sent") >= case.median("asyncdist", "most_read") > 0
        assert case.median("asyncdist", "first") > 0
    (table,) = ScaleBenchmark.page(report).grids
    assert [row[0] for row in table.rows] == ["2", str(size)]
    simulated = simulate(Shape(size, per_host=size, memory=False), Costs())
    assert simulated.sent == pytest.approx(large.median("asyncdist", "sent"), rel=0.3)


@pytest.mark.exhaustive
@pytest.mark.processes
def test_simulation_is_compared_with_processes():
    plan = ScalePlan(parts=("processes", "simulation"), rounds=1, processes=(3,), simulated=(8, 40))
    report = ScaleBenchmark.run(plan)
    shared, tcp = report.of("processes")
    for case in (shared, tcp):
        assert case.median("asyncdist") > 0
        assert case.median("simulated") > 0
        assert min(case.median(who, "both") for who in ("asyncdist", "gloo", "gloo, file")) > 0
    processes, starts, *simulation = ScaleBenchmark.page(report).grids
    assert len(starts.rows) == 2
    assert [row[1] for row in processes.rows] == ["shm,tcp", "tcp"]
    assert [[row[0] for row in table.rows] for table in simulation] == [["8", "40"]] * 2


def test_all_know_of_a_lost_rank_in_a_time_that_hardly_grows():
    small, large = (simulate(Shape(size), Costs(), is_killed=True) for size in (200, 1600))
    assert 0 < large.killed.known < 3 * small.killed.known
    assert small.later < small.first < large.start
    assert 0 < large.killed.regroup < 3 * small.killed.regroup


def test_faults_are_noticed_and_all_others_go_on_in_a_bounded_time():
    # The simulation asserts that a lost rank is named, that all decide the same, and that the store has lost no client.
    found = simulate(Shape(160), Costs(), faults=True)
    timeout = Config().heartbeat
    assert max(found.killed.known, found.rack.known) < 0.1
    assert all(0.8 * timeout < loss.known < timeout + 1 for loss in (found.stopped, found.cut, found.first_cut))
    assert max(loss.regroup for loss in (found.killed, found.stopped, found.rack, found.cut)) < 1
    # One coordinator after the other is silent, and most ranks had no connection to any of them.
    assert timeout < found.first_cut.regroup < 5 * timeout
    # All wait for the slow rank, and only for what it does itself.
    assert found.later < found.slow_barrier < 20 * found.later
    assert found.start < found.slow_start < found.start + 20 * Costs().start + 0.1
    # The clients try again within a second.
    assert 0 < found.busy < found.back < 1.5


def test_rack_of_relays_of_relays_is_left_out_in_a_second(monkeypatch):
    monkeypatch.setattr(agreements, "DEGREE", 8)
    found = simulate(Shape(600), Costs(), faults=True)
    assert max(loss.regroup for loss in (found.killed, found.stopped, found.rack, found.cut)) < 1


def test_one_thread_one_processor_and_one_wire_do_one_thing_at_a_time():
    async def arrivals() -> list[tuple[str, float]]:
        cluster = Cluster(Shape(3, per_host=2, processors=1), COSTS)
        one, mate, other = cluster.processes
        arrived: list[tuple[str, float]] = []

        def arrive(name: str) -> None:
            arrived.append((name, cluster.now()))

        one.send(other, 50, 2.0, 3.0, arrive, "first")  # sent at 2.0, on the wire for 0.5, there at 3.5
        one.send(other, 50, 2.0, 3.0, arrive, "second")  # sent at 4.0, there at 5.5, processed after the first
        mate.send(one, 50, 1.0, 1.0, arrive, "within")  # the only processor of the host is free at 4.0
        await asyncio.sleep(100)
        return arrived

    assert virtual_time.run(arrivals()) == [("within", 6.0), ("first", 6.5), ("second", 9.5)]


def test_silent_process_handles_no_message():
    async def handled() -> list[str]:
        cluster = Cluster(Shape(2, per_host=1, processors=1), COSTS)
        names: list[str] = []
        cluster.processes[0].send(cluster.processes[1], 0, 0.0, 1.0, names.append, "message")
        cluster.processes[1].is_silent = True
        await asyncio.sleep(100)
        return names

    assert virtual_time.run(handled()) == []


def test_tasks_that_wait_for_each_other_are_an_error():
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="wait for each other"):
        virtual_time.run(wait())
