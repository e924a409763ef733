"""The measurement of the links between hosts, and profiles: every rank gets the same model."""

import asyncio
import json
import os
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest

from asyncdist.config import DEFAULT_LANES, Config
from asyncdist.errors import UsageError
from asyncdist.groups.calibration import lanes as lane_measurement
from asyncdist.groups.calibration import measurement
from asyncdist.groups.calibration.lanes import measure_lanes
from asyncdist.groups.calibration.measurement import first_of_hosts, measure_links
from asyncdist.groups.calibration.profile import (
    FEW_LANES,
    MANY_LANES,
    MANY_LANES_WITH_THREADS,
    combined,
    lanes_of,
    model_of,
    read_profile,
    write_profile,
)
from asyncdist.groups.group import Group
from asyncdist.kernel.algorithms.selection import Model, choose
from asyncdist.testing.cluster import world_of
from asyncdist_transports.byte_stream import Writer
from asyncdist_transports.tcp.transport import TcpTransport
from tests.support.ranks import sums

LONG = 20.0
VALUES = {"alpha": 2e-3, "beta": 8e-9, "overhead": 20e-6}


def test_first_rank_of_each_host_measures():
    assert first_of_hosts(["b", "b", "a", "b", "a"]) == [0, 2]
    assert first_of_hosts(["a", "a"]) == [0]


def test_slowest_link_and_typical_delays_count():
    results = [VALUES, None, {**VALUES, "beta": 80e-9, "alpha": 9e-3}, {}, {"alpha": 1e-3, "overhead": 10e-6}]
    assert combined(results) == {"alpha": 2e-3, "beta": 80e-9, "overhead": 20e-6}
    assert combined([None, {}]) == {}


def test_model_keeps_what_was_not_measured():
    base = Model(segment_nbytes=123)
    model = model_of(base, {"alpha": 1.0, "overhead": 0.5}, "a test")
    assert model == Model(alpha=1.0, overhead=0.5, segment_nbytes=123, source="a test")
    assert model_of(base, {}, "a test") is base


@pytest.mark.parametrize("transport", ["inproc", "tcp", "tcp,shm"])
async def test_ranks_on_several_hosts_measure_and_share_one_model(transport, monkeypatch):
    # The machine may be busy.
    monkeypatch.setattr(measurement, "LIMIT", LONG)
    hosts = ["a", "a", "b", "b", "c"]
    async with world_of(5, transport=transport, hosts=hosts, config=Config(calibrate=True)) as groups:
        (model,) = {group.endpoint.model for group in groups}
        assert model.source == "a measurement between 3 hosts at the start"
        assert all(value > 0 for value in (model.alpha, model.beta, model.overhead))
        assert all(group.context.model is group.endpoint.model for group in groups)
        # The recorder is for the program's operations.
        assert [group.endpoint.recorder.last for group in groups] == [None] * 5
        assert await sums(groups, 1000) == [10.0] * 5


@pytest.mark.parametrize(("hosts", "calibrate"), [(["a", "a"], True), (["a", "b"], False)])
async def test_nothing_is_measured_on_one_host_or_if_the_setting_says_so(hosts, calibrate, monkeypatch):
    monkeypatch.setattr(measurement, "measure_links", None)
    async with world_of(2, hosts=hosts, config=Config(calibrate=calibrate)) as groups:
        cores = os.cpu_count() or 1 if len(set(hosts)) == 1 else 0
        assert {group.endpoint.model for group in groups} == {
            Model(segment_nbytes=Config().segment_nbytes, cores=cores)
        }


async def test_measurement_without_time_leaves_a_world_that_works():
    async with world_of(2) as groups:
        found = await asyncio.gather(*(measure_links(group.endpoint, [0, 1], limit=0.0) for group in groups))
        assert found == [{}, {}]
        assert await sums(groups, 3) == [1.0] * 2


async def test_no_message_is_sent_that_would_take_longer_than_the_time_left(monkeypatch):
    """For each rank time is what it has sent."""
    sent, send = defaultdict(list), Group.send

    def sending(group, tensor, *args):
        sent[asyncio.current_task()].append(tensor.nbytes)
        return send(group, tensor, *args)

    def clock():
        return sum(sent[asyncio.current_task()]) * 40e-6

    monkeypatch.setattr(Group, "send", sending)
    monkeypatch.setattr(measurement, "time", SimpleNamespace(monotonic=clock, perf_counter=clock))
    async with world_of(2) as groups:
        found = await asyncio.gather(*(measure_links(group.endpoint, [0, 1], limit=LONG) for group in groups))
    # A link on which 64 KiB take 2.6 s carries 256 KiB in the time, but not 1 MiB.
    assert [max(each) for each in sent.values()] == [256 << 10] * 2
    assert [each["beta"] for each in found] == pytest.approx([40e-6] * 2)


MANY = {FEW_LANES: 1e-8, MANY_LANES: 0.5e-8}


def test_slowest_pair_of_hosts_decides_about_lanes():
    slower = {FEW_LANES: 2e-8, MANY_LANES: 1.9e-8}
    assert combined([MANY, None, slower]) == slower
    threads = {MANY_LANES_WITH_THREADS: 1e-9}
    assert combined([{**MANY, **threads}, {**MANY, **threads}]) == {**MANY, **threads}
    # A host without cores for threads.
    assert combined([{**MANY, **threads}, MANY]) == MANY


@pytest.mark.parametrize(
    ("few", "many", "threads", "due"),
    [
        (10, 9, None, {}),
        (10, 6, None, {"lanes": 4}),
        (10, 12, 11, {}),
        (10, 6, 5.5, {"lanes": 4}),
        (10, 9, 5, {"lanes": 4, "tcp_threads": "always"}),
        (10, 6, 3, {"lanes": 4, "tcp_threads": "always"}),
        (None, 6, 3, {}),
    ],
)
def test_more_connections_or_threads_must_be_faster_by_a_fifth(few, many, threads, due):
    times = {FEW_LANES: few, MANY_LANES: many, MANY_LANES_WITH_THREADS: threads}
    assert lanes_of({name: time * 1e-9 for name, time in times.items() if time is not None}) == due


@pytest.mark.parametrize(("lanes", "due"), [(0, 4), (1, 1)])
async def test_hosts_use_several_lanes_where_the_network_limits_each_connection(lanes, due, monkeypatch):
    """Time is what the busiest connection has carried."""
    opened, carried = [], Counter()

    def sending(writer, message):
        carried[writer] += len(message.body)
        return send(writer, message)

    def opening(self, peer, lane, where):
        opened.append((self.host.rank, lane))
        return opens(self, peer, lane, where)

    def clock():
        return max(carried.values(), default=0) / 20e6

    send, opens = Writer.send, TcpTransport.open
    monkeypatch.setattr(Writer, "send", sending)
    monkeypatch.setattr(TcpTransport, "open", opening)
    monkeypatch.setattr(lane_measurement, "time", SimpleNamespace(monotonic=time.monotonic, perf_counter=clock))
    monkeypatch.setattr(measurement, "LIMIT", LONG)
    config = Config(lanes=lanes, stripe_nbytes=1 << 20, calibrate=True, tcp_threads="never")
    async with world_of(3, transport="tcp", hosts=["a", "b", "c"], config=config) as groups:
        assert [group.context.config.lanes for group in groups] == [due] * 3
        # Without a partner this rank has measured nothing.
        assert {lane for rank, lane in opened if rank == 2} <= {0}
        assert await sums(groups, 2_000_000) == [3.0] * 3
        assert {lane for rank, lane in opened if rank == 2} == set(range(due))


async def test_lanes_are_not_measured_on_a_link_without_them(monkeypatch):
    monkeypatch.setattr(measurement, "measure_lanes", None)
    async with world_of(2, transport="inproc", hosts=["a", "b"], config=Config(calibrate=True)) as groups:
        assert [group.context.config.lanes for group in groups] == [DEFAULT_LANES] * 2


async def test_lanes_of_a_slow_link_are_not_measured():
    async with world_of(2, transport="tcp") as groups:
        until = time.monotonic() + 0.01
        pairs = (
            measure_lanes(group.endpoint, [0, 1], "calibration", beta=1e-6, until=until, threads=True)
            for group in groups
        )
        assert await asyncio.gather(*pairs) == [{}, {}]
        assert [group.endpoint.config.lanes for group in groups] == [DEFAULT_LANES] * 2


@pytest.mark.parametrize(("cores", "names"), [(True, 3), (False, 2)])
async def test_threads_are_tried_if_both_hosts_have_cores_for_them(cores, names):
    async with world_of(2, transport="tcp") as groups:
        until = time.monotonic() + 60.0
        pairs = [
            measure_lanes(groups[0].endpoint, [0, 1], "calibration", beta=1e-8, until=until, threads=True),
            measure_lanes(groups[1].endpoint, [0, 1], "calibration", beta=1e-9, until=until, threads=cores),
        ]
        one, other = await asyncio.gather(*pairs)
    assert one.keys() == other.keys() == {FEW_LANES, MANY_LANES, *([MANY_LANES_WITH_THREADS] if cores else [])}
    assert len(one) == names


async def test_profile_of_the_lowest_rank_replaces_the_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(measurement, "measure_links", None)
    path = tmp_path / "profile.json"
    write_profile(path, VALUES, {"hosts": 2})
    assert json.loads(path.read_text())["hosts"] == 2
    config = Config(profile=str(path))
    async with world_of(3, hosts=["a", "b", "b"], config=config) as groups:
        (model,) = {group.endpoint.model for group in groups}
        assert (model.alpha, model.beta, model.overhead) == (2e-3, 8e-9, 20e-6)
        assert model.segment_nbytes == config.segment_nbytes
        assert "ASYNCDIST_PROFILE" in model.source


@pytest.mark.parametrize(("setting", "due"), [("auto", "always"), ("never", "never")])
@pytest.mark.parametrize(("lanes", "due_lanes"), [(0, 4), (3, 3)])
async def test_settings_precede_what_a_profile_says_about_lanes(tmp_path, setting, due, lanes, due_lanes):
    path = tmp_path / "profile.json"
    write_profile(path, {**VALUES, FEW_LANES: 10e-9, MANY_LANES: 6e-9, MANY_LANES_WITH_THREADS: 3e-9}, {"hosts": 2})
    config = Config(profile=str(path), tcp_threads=setting, lanes=lanes)
    async with world_of(2, hosts=["a", "b"], config=config) as groups:
        used = {(group.context.config.lanes, group.context.config.tcp_threads) for group in groups}
    assert used == {(due_lanes, setting if lanes else due)}


def test_slow_rounds_make_schedules_with_few_rounds_win():
    near, far = Model(), model_of(Model(), {**VALUES, "beta": 1e-9}, "a test")
    assert choose("all_reduce", 1 << 20, 8, model=near) == "halving"
    assert choose("all_reduce", 1 << 20, 8, model=far) == "doubling"


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"seconds": {}}', '{"seconds": {"alpha": "x"}}', '{"seconds": null}']
)
def test_file_that_is_no_profile_is_refused(tmp_path, content):
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"ASYNCDIST_PROFILE=.*not a profile.*--calibrate"):
        read_profile(str(path))


def test_missing_profile_and_impossible_values_are_refused(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_profile(str(tmp_path / "none"))
    path = tmp_path / "profile.json"
    write_profile(path, {**VALUES, "beta": -1.0}, {})
    with pytest.raises(UsageError, match="measure them again"):
        read_profile(str(path))
