"""Which connection gives way at a full port, and the log lines of refused ones."""

import logging

import pytest

from asyncdist.net import admission, refusals
from asyncdist.net.admission import EvictingQueue
from asyncdist.net.refusals import PERIOD, RefusalLog


@pytest.fixture
def clock(monkeypatch):
    """The clock of both modules, a list with the time."""
    now = [100.0]
    for module in (admission, refusals):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


def test_further_connection_evicts_the_one_that_was_added_first():
    evicted: list[str] = []
    queue = EvictingQueue(2, evicted.append)
    for connection in "abcd":
        queue.add(connection)
    assert evicted == ["a", "b"]
    assert len(queue) == 2


def test_connection_that_is_added_again_is_the_newest_and_one_that_was_discarded_is_not_evicted():
    evicted: list[str] = []
    queue = EvictingQueue(2, evicted.append)
    for connection in "aba":
        queue.add(connection)
    queue.add("c")
    assert evicted == ["b"]
    queue.discard("a")
    queue.discard("a")
    queue.add("d")
    assert evicted == ["b"]


def test_young_connection_is_spared(clock):
    evicted: list[str] = []
    queue = EvictingQueue(2, evicted.append)
    assert not queue.evict_oldest()
    queue.add("a")
    assert not queue.evict_oldest(older_than=1.0)
    clock[0] += 1.0
    assert queue.evict_oldest(older_than=1.0)
    assert evicted == ["a"]


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


def test_first_refusal_is_logged_at_once_and_the_others_together(clock, caplog):
    log = RefusalLog(logging.getLogger("test"), "the port")
    log.add("it is silent", "10.0.0.1:5")
    assert lines(caplog) == ["the port refused 10.0.0.1:5: it is silent"]
    for _ in range(500):
        log.add("it is silent")
    log.add("it speaks HTTP")
    assert len(lines(caplog)) == 1
    clock[0] += PERIOD
    log.add("it is silent")
    assert lines(caplog)[1:] == ["the port refused 502 connections in 10 s: it is silent (501), it speaks HTTP (1)"]
    clock[0] += PERIOD
    log.add("it is silent again")
    assert lines(caplog)[2:] == ["the port refused a connection: it is silent again"]


def test_reasons_with_what_strangers_have_sent_are_limited_and_the_rest_is_logged_at_the_end(clock, caplog):
    log = RefusalLog(logging.getLogger("test"), "the port")
    for number in range(1000):
        log.add(f"it began with {number}")
    log.flush()
    log.flush()
    assert len(lines(caplog)) == 2
    assert "another reason (991)" in lines(caplog)[1]
    assert lines(caplog)[1].count("it began with") == 8
