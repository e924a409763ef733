"""From whom readers copy: simulated hosts that die, stall and join at every point."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdist.errors import ProtocolError
from asyncdist.weights.content.layout import layout_of
from asyncdist.weights.content.selection import whole_selection
from asyncdist.weights.transfer.fan_out import HolderRecord, ranked_sources
from asyncdist.weights.transfer.held_version import HeldVersion
from asyncdist.weights.transfer.serving import VersionServer
from asyncdist.weights.transfer.transfer_messages import REFUSED, Question, decode
from asyncdist.weights.transfer.version_table import new_version

PUBLISHER = "publisher"


def record(process, host=None, *, complete=False, selection=""):
    return HolderRecord(process, process, process if host is None else host, selection, complete, [])


class Hosts:
    """Readers that copy one version from each other. In a step each source sends one block over its link.

    Readers begin in the order of their numbers. ``links`` limits what a source sends in a step.
    """

    def __init__(self, num_blocks, hosts):
        self.num_blocks = num_blocks
        self.order = [PUBLISHER, *(f"reader{number}" for number in range(len(hosts)))]
        self.host = dict(zip(self.order, ["host of the publisher", *hosts], strict=True))
        self.here = dict.fromkeys(self.order, 0) | {PUBLISHER: num_blocks}
        self.alive = set(self.order)
        self.gone_up = set()
        self.steps = 0
        self.sent = dict.fromkeys(self.order, 0)

    def records(self):
        present = [each for each in self.order if each in self.alive and each not in self.gone_up]
        return {each: record(each, self.host[each], complete=self.here[each] == self.num_blocks) for each in present}

    def source(self, reader):
        records = self.records()
        sources = ranked_sources(self.order, records, record(reader, self.host[reader]), self.num_blocks)
        return sources[0].process if sources else None

    def step(self):
        readers = [each for each in self.order if each in self.alive and self.here[each] < self.num_blocks]
        sources = {reader: self.source(reader) for reader in readers if reader not in self.gone_up}
        before, busy = dict(self.here), set()
        for reader, source in sources.items():
            if source is None:
                self.gone_up.add(reader)
            elif self.host[source] == self.host[reader]:
                if before[source] == self.num_blocks:
                    self.here[reader] = self.num_blocks
            elif before[source] > before[reader] and source not in busy:
                busy.add(source)
                self.here[reader] += 1
                self.sent[source] += 1
        self.steps += 1

    @property
    def is_over(self):
        living = self.alive - {PUBLISHER}
        return all(self.here[each] == self.num_blocks or each in self.gone_up for each in living)

    def run(self, most=10_000):
        while not self.is_over:
            self.step()
            assert self.steps < most, f"readers wait for each other: {self.here}, {self.records()}"


def test_hosts_form_a_chain_and_each_sends_the_version_once():
    hosts = Hosts(100, [f"host{number}" for number in range(8)])
    hosts.run()
    assert hosts.steps == 100 + 7
    assert set(hosts.sent.values()) == {100, 0}
    assert hosts.sent[PUBLISHER] == 100


def test_processes_of_a_host_share_one_copy():
    hosts = Hosts(10, ["a", "a", "a", "b", "b", "host of the publisher"])
    hosts.run()
    assert sum(hosts.sent.values()) == 20


def test_more_hosts_than_blocks_form_a_tree():
    hosts = Hosts(1, [f"host{number}" for number in range(64)])
    hosts.run()
    assert hosts.steps <= 16
    assert max(hosts.sent.values()) <= 3


@pytest.mark.parametrize("victim", ["publisher", "reader0", "reader1", "reader3"])
def test_death_at_every_step_leaves_no_reader_waiting(victim):
    for at in itertools.count():
        hosts = Hosts(6, ["a", "b", "b", "c", "d"])
        while not hosts.is_over and hosts.steps < at:
            hosts.step()
        if hosts.is_over:
            break
        hosts.alive.discard(victim)
        hosts.run()
        living = hosts.alive - {PUBLISHER}
        if victim != PUBLISHER or any(hosts.here[each] == 6 for each in hosts.order[1:]):
            assert all(hosts.here[each] == 6 for each in living), f"died at step {at}: {hosts.here}"
        else:
            assert hosts.gone_up == living


@settings(max_examples=300)
@given(
    st.integers(1, 12),
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=6),
)
def test_any_deaths_leave_no_reader_waiting(num_blocks, hosts, deaths):
    world = Hosts(num_blocks, hosts)
    while not world.is_over:
        for at, who in deaths:
            if at == world.steps:
                world.alive.discard(world.order[who % len(world.order)])
        world.step()
        assert world.steps < 1000
    if PUBLISHER in world.alive:
        assert all(world.here[each] == num_blocks for each in world.alive)


def test_stalled_source_is_passed_over():
    order = [PUBLISHER, "first", "second"]
    holders = {PUBLISHER: record(PUBLISHER, complete=True), "first": record("first"), "second": record("second")}
    own = holders["second"]
    assert [each.process for each in ranked_sources(order, holders, own, 100)] == ["first", PUBLISHER]
    assert [each.process for each in ranked_sources(order, holders, own, 100, {"first"})] == [PUBLISHER]


def test_reader_of_a_slice_copies_from_readers_of_the_same_slice_and_from_complete_ones():
    order = [PUBLISHER, "whole", "same", "other", "own", "later"]
    holders = {
        PUBLISHER: record(PUBLISHER, complete=True),
        "whole": record("whole"),
        "same": record("same", selection="left"),
        "other": record("other", selection="right", complete=True),
        "own": record("own", selection="left"),
        "later": record("later", selection="left", complete=True),
    }
    sources = [each.process for each in ranked_sources(order, holders, holders["own"], 100)]
    assert sources == ["same", PUBLISHER, "later"]


def test_reader_whose_place_was_deleted_with_its_version_copies_only_from_those_that_have_all():
    """The publisher deletes the order of a version that it gives up; a reader that comes then begins another one."""
    holders = {each: record(each, complete=each == "whole") for each in ("whole", "newcomer", "own")}
    sources = ranked_sources(["newcomer", "whole"], holders, holders["own"], 100)
    assert [each.process for each in sources] == ["whole"]


def test_process_without_shared_memory_shares_with_no_other():
    assert not record("one", "").shares_with(record("two", ""))
    assert record("one", "a").shares_with(record("two", "a"))


def test_record_travels_as_bytes():
    sent = HolderRecord("e.1", "e", "host", "", True, ["h", 1])
    assert HolderRecord.decode(sent.encode()) == sent
    for data in (b"", b"{}", b"[]", b'{"entry": 1}'):
        with pytest.raises(ProtocolError):
            HolderRecord.decode(data)


async def test_version_that_was_given_up_and_begun_anew_has_another_place_in_the_order():
    """A reader that asked for the former entry would wait for this process, which may wait for that reader."""

    class Channel:
        error = None

        def __init__(self):
            self.sent = []

        def send(self, head):
            self.sent.append(decode(head))

    channel = Channel()
    layout = layout_of({"a": torch.zeros(4)})
    held = HeldVersion(new_version(1, 1, None, 1), whole_selection(layout), np.zeros(1, np.uint64), lambda held: None)
    server = VersionServer({"me.2": held})
    for number, entry in enumerate(["me.1", "me.2"]):
        server.ask(channel, Question(number, entry, "", None, 0, True, []))
    assert [(kind, fields[0]) for kind, fields in channel.sent] == [(REFUSED, 0)]
    await server.close()
