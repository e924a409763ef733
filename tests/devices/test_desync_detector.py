"""Calls that do not fit together, over a way that compares nothing and waits for ever."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asyncdist.devices import desync_detector
from asyncdist.errors import GroupError, MismatchError, PeerLostError
from tests.support.devices import PretendStreams, Queued, devices_of


class Silent(Queued):
    """A way that tells nobody of calls that differ."""

    name = "silent"
    compares = False

    def broadcast(self, fingerprint, memory, root):
        return iter(())


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(desync_detector, "_MIN_INTERVAL", 0.1)


async def held(size):
    """Return devices that never come to an end of what they are told, once their ranks have met."""
    return [PretendStreams(f"GPU-{rank}") for rank in range(size)]


async def outcomes(groups, streams, works):
    try:
        return await asyncio.wait_for(asyncio.gather(*works, return_exceptions=True), 15)
    finally:
        for each in streams:
            each.release()


@pytest.mark.exhaustive
@pytest.mark.parametrize("odd", [0, 1, 3])
async def test_who_calls_something_else_is_named_before_the_deadline(odd):
    streams = await held(4)
    async with devices_of(4, [Silent], streams, timeout=60) as groups:
        await asyncio.gather(*(group.all_reduce(torch.ones(4)) for group in groups))
        for each in streams:
            each.hold()
        works = [
            group.broadcast(torch.ones(4), 2) if rank == odd else group.all_reduce(torch.ones(4))
            for rank, group in enumerate(groups)
        ]
        said = await outcomes(groups, streams, works)
        assert all(isinstance(one, GroupError) for one in said)
        assert any(isinstance(one, MismatchError) for one in said)
        for one in said:
            assert "all_reduce" in str(one)
            assert "broadcast" in str(one)
            assert f"rank {odd}" in str(one)


async def test_who_is_told_first_compares_when_it_makes_the_call(eventually):
    streams = await held(2)
    async with devices_of(2, [Silent], streams, timeout=60) as groups:
        await asyncio.gather(*(group.all_reduce(torch.ones(4)) for group in groups))
        for each in streams:
            each.hold()
        works = [groups[0].all_reduce(torch.ones(4))]
        groups[1]._desync_detector.listen()
        await eventually(lambda: groups[1]._desync_detector._early_reports)
        works.append(groups[1].all_reduce(torch.ones(5)))
        assert any(isinstance(one, MismatchError) for one in await outcomes(groups, streams, works))


async def test_one_that_has_passed_on_still_finds_the_difference():
    """Rank 1's call was over at once, as a small broadcast's may be; what rank 0 tells, it compares nevertheless."""
    streams = await held(2)
    async with devices_of(2, [Silent], streams, timeout=60) as groups:
        await asyncio.gather(*(group.all_reduce(torch.ones(4)) for group in groups))
        groups[1]._desync_detector.listen()
        await groups[1].broadcast(torch.ones(4), 1)
        streams[0].hold()
        (said,) = await outcomes(groups, streams, [groups[0].all_reduce(torch.ones(4))])
        assert isinstance(said, GroupError)
        assert "broadcast" in str(said)


async def test_slow_calls_that_fit_together_are_left_alone(eventually):
    streams = await held(3)
    async with devices_of(3, [Silent], streams, timeout=60) as groups:
        for _ in range(3):
            for each in streams:
                each.hold()
            works = [group.all_reduce(torch.ones(4)) for group in groups]
            number = groups[0]._desync_detector._numbers[-1]
            for group in groups:
                group._desync_detector._next_report_at = 0.0
            await eventually(lambda: all(group._desync_detector._last_reported == number for group in groups))  # noqa: B023
            for each in streams:
                each.release()
            await asyncio.gather(*works)


async def test_who_waits_for_those_who_have_all_left_is_told():
    streams = await held(3)
    async with devices_of(3, [Silent], streams, timeout=60) as groups:
        await asyncio.gather(*(group.all_reduce(torch.ones(4)) for group in groups))
        streams[0].hold()
        work = groups[0].all_reduce(torch.ones(4))
        for group in groups[1:]:
            group.close()
            group._host.mesh.close()
        (said,) = await outcomes(groups, streams, [work])
        assert isinstance(said, PeerLostError)
        assert "it has destroyed its process group" in str(said)


async def test_a_call_that_is_refused_takes_no_number():
    streams = await held(2)
    async with devices_of(2, [Silent], streams) as groups:
        streams[0].captures = True
        with pytest.raises(Exception, match="captured"):
            groups[0].all_reduce(torch.ones(4))
        streams[0].captures = False
        await asyncio.gather(*(group.all_reduce(torch.ones(4)) for group in groups))
        assert [list(group._desync_detector._numbers) for group in groups] == [[1], [1]]


async def test_only_the_last_calls_are_remembered(monkeypatch):
    monkeypatch.setattr(desync_detector, "_MAX_KEPT_CALLS", 5)
    async with devices_of(1, [Silent]) as [group]:
        for _ in range(20):
            await group.all_reduce(torch.ones(4))
        assert sorted(group._desync_detector._calls) == list(range(16, 21))


def test_telling_grows_rarer():
    told = []

    class Letters:
        def send(self, words, peer, tag, timeout):
            told.append(peer)
            return self

        def add_done_callback(self, call):
            pass

    host = type("Host", (), {"sibling": lambda what: Letters()})
    context = type("Site", (), {"rank": 0, "size": 3, "host": host})
    call = desync_detector.DesyncDetector(context, told.append)
    for number in range(1, 200):
        call.report_call(number, 7, 0.0)
    assert sorted(told) == [1, 2], "once to each neighbour, and then not for some time"
