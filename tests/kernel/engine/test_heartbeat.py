"""What a rank does with missing heartbeats: whom it asks and spares, and what its error says. All around it is fake."""

from __future__ import annotations

import os
from collections import deque
from types import SimpleNamespace

import msgpack
import pytest

from asyncdist.kernel.engine import heartbeat
from asyncdist.kernel.engine.heartbeat import Heartbeat
from asyncdist.kernel.transport.wire_format import HEARD, SUSPECT
from asyncdist.net.detector import BEATS, Liveness
from asyncdist.net.process_identity import ProcessState

TIMEOUT = 10.0
PERIOD = TIMEOUT / BEATS


class Wire:
    """A transport whose peers are heard unless they are in ``silent``."""

    beats = True

    def __init__(self, name, *peers):
        self.name, self.peers = name, set(peers)
        self.silent, self.pulses = set(), 0

    def pulse(self):
        self.pulses += 1

    def unanswered(self):
        return set()

    def beat(self):
        return {peer: peer not in self.silent for peer in sorted(self.peers)}


class Rank:
    """One rank: its heartbeat, and what it has lost, read and observed. ``states`` are of the processes that it sees."""

    def __init__(self, job, rank, *wires):
        self.job, self.rank, self.wires = job, rank, wires
        self.lost, self.leaving, self.read, self.states, self.observed = {}, set(), [], {}, []
        selector = SimpleNamespace(transports=list(wires), on_host_of=lambda peer: job.hosts.get(peer, ()))
        self.transport_selector, self.config = selector, SimpleNamespace(heartbeat=job.timeout)
        self.read_arrived, self.processes = self.read.append, SimpleNamespace(state_of=self.states.get)
        failures = SimpleNamespace(accepts_notices=self.accepts_notices, lost=self.lose, observe=self.observe)
        self.heartbeat = Heartbeat(self, failures)

    def accepts_notices(self, peer):
        return peer not in self.lost and peer not in self.leaving

    def lose(self, peer, reason, last_heard):
        self.lost[peer] = (reason, last_heard)

    def observe(self, peer, liveness, reason):
        self.observed.append((peer, liveness))

    def call_later(self, callback):
        callback()

    def send_unordered(self, peer, kind, key, body):
        self.job.sent.append((self.rank, peer, kind, body))


class Job:
    """Some ranks, a clock, and the messages on their way."""

    def __init__(self, monkeypatch, timeout=TIMEOUT):
        self.timeout, self.now, self.sent, self.asked = timeout, 0.0, deque(), []
        self.hosts, self.ranks, self.calls = {}, {}, []
        periodic = SimpleNamespace(
            start=lambda function, period: self.calls.append(function),
            stop=lambda function: function in self.calls and self.calls.remove(function),
        )
        monkeypatch.setattr(heartbeat, "periodic_calls", periodic)
        monkeypatch.setattr(heartbeat, "monotonic", lambda: self.now)

    def rank(self, rank, *wires):
        self.ranks[rank] = one = Rank(self, rank, *wires)
        one.heartbeat.start(SimpleNamespace(look=lambda action: action()))
        return one

    def pass_time(self, periods):
        for _ in range(periods):
            self.now += PERIOD
            for call in list(self.calls):
                call()
            while self.sent:
                sender, peer, kind, body = self.sent.popleft()
                if kind == SUSPECT:
                    self.asked.append((sender, peer))
                if peer in self.ranks:
                    one = self.ranks[peer].heartbeat
                    (one.on_question if kind == SUSPECT else one.on_answer)(sender, body)


@pytest.fixture
def job(monkeypatch):
    return Job(monkeypatch)


def test_silent_rank_of_this_host_is_lost_and_the_error_says_what_its_process_does(job):
    wire = Wire("shm", 1, 2)
    wire.silent = {1}
    rank = job.rank(0, wire)
    rank.states[1] = ProcessState(text="its process is stopped")
    job.pass_time(12)
    assert rank.lost == {1: (f"no heartbeat for {TIMEOUT:.1f} s: its process is stopped", pytest.approx(TIMEOUT))}
    assert not job.asked
    # A goodbye may have arrived unread.
    assert set(rank.read) == {1}
    assert wire.pulses == 12


def test_process_at_work_is_spared_for_a_while_and_one_in_a_debugger_always(job):
    wire = Wire("shm", 1, 2)
    wire.silent = {1, 2}
    rank = job.rank(0, wire)
    rank.states[1] = ProcessState(is_working=True, text="works")
    rank.states[2] = ProcessState(is_traced=True, text="traced")
    job.pass_time(100)
    assert not rank.lost
    job.pass_time(100)
    assert rank.lost.keys() == {1}


def test_rank_of_another_host_is_spared_if_a_rank_beside_it_sees_it_work(job):
    job.hosts = {3: {2, 3}}
    far, near = Wire("tcp", 3), Wire("shm", 3)
    far.silent = near.silent = {3}
    rank, beside = job.rank(0, far), job.rank(2, near)
    beside.states[3] = ProcessState(is_working=True, text="works")
    job.pass_time(60)
    assert not rank.lost
    assert not beside.lost
    assert set(job.asked) == {(0, 2)}
    beside.states[3] = ProcessState(text="its process is stopped")
    job.pass_time(8)
    assert "its process is stopped" in beside.lost[3][0]
    assert "rank 2 did not hear it either" in rank.lost[3][0]


def test_error_says_that_others_hear_the_silent_rank(job):
    wire = Wire("tcp", 1, 2, 3)
    wire.silent = {1}
    rank = job.rank(0, wire)
    for other in (2, 3):
        # It works, and is not late: others hear it.
        job.rank(other, Wire("tcp", 0, 1)).states[1] = ProcessState(is_working=True, text="works")
    job.pass_time(12)
    assert (
        rank.lost[1][0] == "no heartbeat for 10.0 s, but ranks 2-3 heard it: its packets to rank 0 are lost on the way"
    )


def test_error_says_that_this_rank_hears_nobody_over_the_network(job):
    wire, local = Wire("tcp", 2, 3), Wire("shm", 1)
    wire.silent = {2, 3}
    rank = job.rank(0, wire, local)
    job.pass_time(12)
    assert "nor from any other rank over tcp: the network of rank 0 may be down" in rank.lost[2][0]
    assert 1 not in rank.lost


def test_observers_learn_of_suspicion_and_recovery(job):
    wire = Wire("tcp", 1)
    rank = job.rank(0, wire)
    for silent in ({1}, set()):
        wire.silent = silent
        job.pass_time(8)
    assert rank.observed == [(1, Liveness.SUSPECTED), (1, Liveness.RECOVERED)]


def test_rank_that_leaves_in_order_is_not_lost(job):
    wire = Wire("tcp", 1)
    wire.silent = {1}
    rank = job.rank(0, wire)
    job.pass_time(8)
    rank.leaving.add(1)
    job.pass_time(20)
    assert not rank.lost


def test_number_of_ranks_that_are_asked_is_limited(job):
    wire = Wire("tcp", *range(1, 100))
    wire.silent = {7}
    job.hosts = {7: {6, 7}}
    job.rank(0, wire)
    job.pass_time(8)
    assert {asked for _, asked in job.asked} >= {6, 1}
    assert len(set(job.asked)) == 8


@pytest.mark.parametrize("body", [b"", b"\xc1", msgpack.packb("x"), msgpack.packb([1]), msgpack.packb([1, 2, 3, 4])])
def test_malformed_questions_and_answers_are_ignored(job, body):
    wire = Wire("tcp", 1)
    rank = job.rank(0, wire)
    job.pass_time(1)
    rank.heartbeat.on_question(1, body)
    rank.heartbeat.on_answer(1, body)
    assert not job.sent


def test_rank_that_could_not_run_says_so(job, caplog):
    rank = job.rank(0, Wire("shm", 1))
    job.pass_time(3)
    assert not caplog.records
    job.now += 8.0
    job.pass_time(1)
    assert "rank 0 could not run for 9.0 s: a call held the interpreter" in caplog.text
    assert not rank.lost


def test_heartbeats_that_are_off_or_stopped_neither_beat_nor_look(monkeypatch):
    job, wire = Job(monkeypatch, timeout=0.0), Wire("shm", 1)
    job.rank(0, wire)
    assert not job.calls
    job.timeout = TIMEOUT
    rank = job.rank(0, wire)
    (call,) = job.calls
    rank.heartbeat.stop()
    rank.heartbeat.stop()
    assert not job.calls
    call()
    assert wire.pulses == 0


def test_heartbeats_of_a_forked_child_end_although_the_parent_pulsed(job):
    wire = Wire("shm", 1)
    rank = job.rank(0, wire)
    (call,) = job.calls

    def pulse():
        if os.fork() == 0:
            rank.heartbeat.after_fork_in_child()
            call()
            rank.heartbeat.stop()
            os._exit(0)

    wire.pulse = pulse
    call()
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0


def test_answer_names_the_suspect_and_what_is_seen(job):
    wire = Wire("shm", 1, 2)
    rank = job.rank(0, wire)
    rank.states[2] = ProcessState(is_working=True, text="works")
    job.pass_time(1)
    rank.heartbeat.on_question(1, msgpack.packb(2))
    ((sender, peer, kind, body),) = job.sent
    assert (sender, peer, kind, msgpack.unpackb(body)) == (0, 1, HEARD, [2, True, True, False])
    rank.heartbeat.on_question(1, msgpack.packb(9))
    assert len(job.sent) == 1
