"""Publishers and subscribers that are killed and stopped at any time: no version is torn, and no memory is left."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from asyncdist.weights import Subscriber
from tests.weights.conftest import TOKEN

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).parent / "program_weights.py"
WIDTH = 1500
"""8.6 MiB of parameters."""
LIMIT = 60.0


@pytest.fixture
def start(nursery, job):
    """Start a publisher or a subscriber: ``start("publisher", ...)``; on another host with ``host=``."""

    def start(function, *args, host="", **settings):
        environment = {"ASYNCDIST_TOKEN": TOKEN, **({"ASYNCDIST_HOST": host} if host else {}), **settings}
        process = nursery.start(PROGRAM, function, job, WIDTH, *args, environment=environment)
        process.hear()
        return process

    return start


def ask(process, order):
    process.say(order)
    return process.hear()


def like():
    return torch.nn.Linear(WIDTH, WIDTH, bias=False, device="meta")


def segments_of(pid):
    """Return the number of shared segments that a process has open."""
    descriptors = [each for each in Path(f"/proc/{pid}/fd").iterdir() if "asyncdist-segment" in os.readlink(each)]
    return len({each.stat().st_ino for each in descriptors})


@pytest.mark.parametrize("host", ["", "elsewhere"])
async def test_publisher_killed_at_any_moment_leaves_only_whole_versions(job, on_host, start, host):
    moments = random.Random(host)
    async with on_host(host, Subscriber, like=like(), job=job) if host else Subscriber(like=like(), job=job) as reader:
        first, incarnation = 0, 0
        for _ in range(3):
            publisher = start("publisher", first + 1000)
            publisher.say(first)
            publisher.hear()
            time.sleep(moments.uniform(0, 0.05))  # noqa: ASYNC251 - the moment of the death
            publisher.kill()
            publisher.wait()
            first += 1000
            survivor = start("publisher")
            assert ask(survivor, first)[0] == "published"
            seen = -1
            while seen < first:
                version = await reader.next(LIMIT)
                async with reader.swap(version) as model:
                    assert version.step == model.weight.min() == model.weight.max()
                assert version.incarnation > incarnation
                seen = version.step
            incarnation = version.incarnation - 1
            survivor.kill()
            survivor.wait()


def test_readers_that_are_killed_and_come_back_cost_no_memory(start, until):
    publisher = start("publisher")
    reader = start("subscriber")
    ask(publisher, 0)
    assert ask(reader, "swap") == (0, 0.0, 0.0)
    for step in range(1, 4):
        victim = start("subscriber")
        assert ask(victim, "swap") == (step - 1, float(step - 1), float(step - 1))
        ask(publisher, step)
        victim.kill()
        victim.wait()
        assert ask(reader, "swap") == (step, float(step), float(step))
    # Those of the newest two versions, and a free one.
    until(lambda: segments_of(publisher.pid) <= 3)
    assert ask(reader, "mapped") <= 5


def test_stopped_reader_that_was_given_up_still_reads_one_version(start):
    settings = {"ASYNCDIST_HEARTBEAT": "0.5"}
    publisher = start("publisher", **settings)
    stopped, other = start("subscriber", **settings), start("subscriber", **settings)
    ask(publisher, 0)
    assert ask(stopped, "swap") == (0, 0.0, 0.0)
    assert ask(stopped, "hold") == 0
    stopped.stop()
    step = 0
    # Until the publisher has given the reader up, whose memory it must not write again.
    until_lost = time.monotonic() + 1.5
    while time.monotonic() < until_lost or step < 8:
        step += 1
        ask(publisher, step)
        assert ask(other, "swap") == (step, float(step), float(step))
    stopped.resume()
    assert ask(stopped, "held") == (0, 0.0, 0.0)
    assert ask(stopped, "swap") == (step, float(step), float(step))
    assert ask(stopped, "held") == (0, 0.0, 0.0)


def test_reader_holds_its_version_when_the_publisher_dies_and_nothing_is_left_of_all(start):
    publisher, reader = start("publisher"), start("subscriber")
    ask(publisher, 7)
    assert ask(reader, "swap") == (7, 7.0, 7.0)
    publisher.kill()
    publisher.wait()
    assert ask(reader, "read") == (7, 7.0, 7.0)
    late, elsewhere = start("subscriber"), start("subscriber", host="elsewhere")
    assert ask(late, "swap") == (7, 7.0, 7.0)
    assert ask(elsewhere, "swap") == (7, 7.0, 7.0)
    reader.kill()
    reader.wait()
    again = start("publisher")
    ask(again, 8)
    for each in (late, elsewhere):
        assert ask(each, "swap") == (8, 8.0, 8.0)
    for each in (again, late, elsewhere):
        each.kill()
        each.wait()
    # Anonymous segments end with their processes; there is no name to be left.
    assert [name for name in os.listdir("/dev/shm") if "asyncdist" in name] == []


@pytest.mark.parametrize("number", [0, 1, 2])
def test_relay_killed_while_it_passes_a_version_on_is_replaced(start, number):
    publisher = start("publisher")
    chain = [start("subscriber", host=f"host{each}") for each in range(4)]
    for step in range(3):
        for each in chain:
            each.say("swap")
        ask(publisher, step)
        if step == 1:
            chain.pop(number).kill()
        for each in chain:
            assert each.hear() == (step, float(step), float(step))


def test_relay_that_is_stopped_is_passed_over(start):
    publisher = start("publisher")
    first, second, third = [start("subscriber", host=f"host{each}") for each in range(3)]
    for each in (first, second, third):
        each.say("swap")
    ask(publisher, 0)
    for each in (first, second, third):
        assert each.hear() == (0, 0.0, 0.0)
    for step in range(1, 3):
        first.say("swap")
        first.stop()
        second.say("swap")
        third.say("swap")
        ask(publisher, step)
        for each in (second, third):
            assert each.hear() == (step, float(step), float(step))
        first.resume()
        assert first.hear()[0] <= step


@pytest.fixture
def start_few_changes(start):
    """Start a publisher or a reader of versions that differ in few values, each on a host of its own."""

    def start_few_changes(role, host):
        return start("few_changes", role, host=host)

    return start_few_changes


def test_publisher_killed_while_it_sends_differences_leaves_the_version_before(start_few_changes):
    publisher, reader = start_few_changes("publisher", "trainer"), start_few_changes("reader", "a")
    ask(publisher, (1, 0))
    assert ask(reader, ("swap", 0)) == (1, 1.0, True)
    reader.say(("swap", 0))
    publisher.say((2, 3))
    assert publisher.wait() == -signal.SIGKILL
    late = start_few_changes("reader", "b")
    late.say(("swap", 0))
    survivor = start_few_changes("publisher", "trainer")
    ask(survivor, (3, 0))
    for each in (reader, late):
        assert each.hear() == (3, 3.0, True)


def test_reader_killed_while_differences_arrive_holds_nobody_up(start_few_changes, until):
    publisher = start_few_changes("publisher", "trainer")
    victim, behind = start_few_changes("reader", "a"), start_few_changes("reader", "b")
    ask(publisher, (1, 0))
    for each in (victim, behind):
        assert ask(each, ("swap", 0)) == (1, 1.0, True)
    victim.say(("swap", 3))
    behind.say(("swap", 0))
    ask(publisher, (2, 0))
    assert victim.wait() == -signal.SIGKILL
    assert behind.hear() == (2, 2.0, True)
    again = start_few_changes("reader", "a")
    assert ask(again, ("swap", 0)) == (2, 2.0, True)
    ask(publisher, (3, 0))
    for each in (behind, again):
        assert ask(each, ("swap", 0)) == (3, 3.0, True)
    until(lambda: segments_of(publisher.pid) <= 3)
