"""How long a server stays awake, and for whom: on a loop whose turns the test takes itself."""

from __future__ import annotations

import pytest

from asyncdist.config import Config
from asyncdist.store.server import busy_poll
from asyncdist.store.server.busy_poll import AdaptiveBusyPoll

pytestmark = pytest.mark.each_loop


class Turns:
    """Stands for a loop and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list = []

    def call_soon(self, call) -> None:
        self.calls.append(call)

    def monotonic(self) -> float:
        return self.now

    def turn(self, seconds: float = 0.0) -> bool:
        """Let time pass and the loop turn once; return whether it would not sleep after that."""
        self.now += seconds
        calls, self.calls = self.calls, []
        for call in calls:
            call()
        return bool(self.calls)


@pytest.fixture
def loop(monkeypatch) -> Turns:
    turns = Turns()
    monkeypatch.setattr(busy_poll, "time", turns)
    return turns


@pytest.fixture
def awake(loop) -> AdaptiveBusyPoll:
    return AdaptiveBusyPoll(loop, 1.0)


def talk(awake: AdaptiveBusyPoll, client: str | None, times: int) -> None:
    for _ in range(times):
        awake.heard(client)


def test_a_few_requests_let_the_loop_sleep(loop, awake):
    talk(awake, "a", 8)
    assert not loop.calls


def test_a_row_of_one_client_keeps_it_awake_as_long_as_that_goes_on(loop, awake):
    talk(awake, "a", 9)
    for _ in range(20):
        assert loop.turn(0.5)
        awake.heard("a")
    assert not loop.turn(1.5)
    assert not loop.calls


def test_many_clients_at_a_time_keep_nobody_awake(loop, awake):
    for _ in range(100):
        talk(awake, "a", 5)
        talk(awake, "b", 5)
    assert not loop.calls


def test_several_at_a_time_keep_nobody_awake(loop, awake):
    talk(awake, None, 100)
    assert not loop.calls


def test_another_client_ends_it(loop, awake):
    talk(awake, "a", 9)
    awake.heard("b")
    assert not loop.turn()


def test_staying_awake_in_vain_takes_a_longer_row_the_next_time_and_success_a_short_one(loop, awake):
    needed = []
    for _ in range(8):
        count = 0
        while not loop.calls:
            awake.heard("a")
            count += 1
        needed.append(count)
        assert not loop.turn(2.0)
    assert needed == [9, 17, 33, 65, 129, 257, 257, 257]
    talk(awake, "a", 257)
    awake.heard("a")
    assert not loop.turn(2.0)
    talk(awake, "a", 17)
    assert loop.calls


@pytest.mark.parametrize(("spin", "cores", "made"), [(300.0, 2, True), (0.0, 2, False), (300.0, 1, False)])
def test_it_is_made_where_it_pays(loop, monkeypatch, spin, cores, made):
    monkeypatch.setattr(busy_poll.os, "cpu_count", lambda: cores)
    assert (AdaptiveBusyPoll.where_it_pays(loop, Config(spin_us=spin)) is not None) is made
