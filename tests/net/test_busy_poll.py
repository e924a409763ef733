"""Adaptive busy polling, on a loop and a clock that the test advances."""

import pytest

from asyncdist.config import Config
from asyncdist.net import busy_poll
from asyncdist.net.busy_poll import AdaptiveBusyPoll


class Turns:
    """A loop and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list = []

    def call_soon(self, call) -> None:
        self.calls.append(call)

    def monotonic(self) -> float:
        return self.now

    def turn(self, seconds: float = 0.0) -> bool:
        """Advance the clock and run one iteration; return whether a callback is scheduled."""
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


def talk(awake: AdaptiveBusyPoll, client: str, times: int) -> None:
    for _ in range(times):
        awake.heard(client)


@pytest.mark.parametrize(
    "clients", [["a"] * 8, [*"aaaaa", *"bbbbb"] * 100, [None] * 100], ids=["few requests", "in turns", "at one time"]
)
def test_loop_sleeps_without_a_long_row_of_one_client(loop, awake, clients):
    for client in clients:
        awake.heard(client)
    assert not loop.calls


def test_row_of_one_client_keeps_the_loop_awake(loop, awake):
    talk(awake, "a", 9)
    for _ in range(20):
        assert loop.turn(0.5)
        awake.heard("a")
    assert not loop.turn(1.5)
    assert not loop.calls


def test_another_client_ends_the_polling(loop, awake):
    talk(awake, "a", 9)
    awake.heard("b")
    assert not loop.turn()


def test_polling_in_vain_doubles_the_row_and_success_resets_it(loop, awake):
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
def test_busy_poll_needs_two_cores_and_a_spin_time(loop, monkeypatch, spin, cores, made):
    monkeypatch.setattr(busy_poll.os, "cpu_count", lambda: cores)
    assert (AdaptiveBusyPoll.where_it_pays(loop, Config(spin_us=spin)) is not None) is made
