"""The desync detector: mismatched calls over a backend that does not compare calls and never completes them."""

import asyncio
import contextlib

import pytest
import torch

from asyncdist.errors import GroupError, MismatchError, PeerLostError
from asyncdist.kernel.devices import desync_detector
from tests.support.devices import PretendStreams, Queued, devices_of


class Silent(Queued):
    """A backend that does not compare calls."""

    name = "silent"
    compares = False

    def broadcast(self, fingerprint, memory, root):
        pass


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(desync_detector, "_MIN_INTERVAL", 0.1)
    monkeypatch.setattr(desync_detector, "_MAX_INTERVAL", 0.1)


class Streams(list):
    """The streams of all ranks."""

    def hold(self):
        for each in self:
            each.hold()

    def release(self):
        for each in self:
            each.release()


@contextlib.asynccontextmanager
async def silent_world(size, kinds=(Silent,)):
    """Yield the groups of a world of pretended devices, which have made a call, and their streams."""
    streams = Streams(PretendStreams(f"GPU-{rank}") for rank in range(size))
    async with devices_of(size, kinds, streams, timeout=60) as groups:
        await asyncio.gather(*(group.all_reduce(torch.ones(4)) for group in groups))
        yield groups, streams


async def outcomes(streams, works):
    try:
        return await asyncio.wait_for(asyncio.gather(*works, return_exceptions=True), 15)
    finally:
        streams.release()


@pytest.mark.exhaustive
@pytest.mark.parametrize("odd", [0, 1, 3])
async def test_rank_with_a_different_call_is_named_before_the_deadline(odd):
    async with silent_world(4) as (groups, streams):
        streams.hold()
        works = [
            group.broadcast(torch.ones(4), 2) if rank == odd else group.all_reduce(torch.ones(4))
            for rank, group in enumerate(groups)
        ]
        said = await outcomes(streams, works)
        assert all(isinstance(one, GroupError) for one in said)
        assert any(isinstance(one, MismatchError) for one in said)
        for one in said:
            assert "all_reduce" in str(one)
            assert "broadcast" in str(one)
            assert f"rank {odd}" in str(one)


async def test_early_report_is_compared_when_the_call_is_made(eventually):
    async with silent_world(2) as (groups, streams):
        streams.hold()
        works = [groups[0].all_reduce(torch.ones(4))]
        groups[1].desync_detector.listen()
        await eventually(lambda: groups[1].desync_detector.early_reports)
        works.append(groups[1].all_reduce(torch.ones(5)))
        assert any(isinstance(one, MismatchError) for one in await outcomes(streams, works))


async def test_rank_whose_call_has_completed_still_finds_the_mismatch():
    """Rank 1's broadcast completes at once; rank 1 still compares the report of rank 0."""
    async with silent_world(2) as (groups, streams):
        groups[1].desync_detector.listen()
        await groups[1].broadcast(torch.ones(4), 1)
        streams[0].hold()
        (said,) = await outcomes(streams, [groups[0].all_reduce(torch.ones(4))])
        assert isinstance(said, GroupError)
        assert "broadcast" in str(said)


async def test_slow_matching_calls_complete(eventually):
    async with silent_world(3) as (groups, streams):
        for _ in range(3):
            streams.hold()
            works = [group.all_reduce(torch.ones(4)) for group in groups]
            number = max(groups[0].desync_detector.calls)
            await eventually(lambda: all(group.desync_detector.last_reported == number for group in groups))  # noqa: B023
            streams.release()
            await asyncio.gather(*works)


async def test_call_fails_when_all_peers_have_left():
    async with silent_world(3) as (groups, streams):
        streams[0].hold()
        work = groups[0].all_reduce(torch.ones(4))
        for group in groups[1:]:
            group.close()
            group.host.endpoint.close()
        (said,) = await outcomes(streams, [work])
        assert isinstance(said, PeerLostError)
        assert "it has destroyed its process group" in str(said)


async def test_rank_listens_only_while_a_call_is_slow_if_the_backend_compares(eventually):
    async with silent_world(2, ()) as (groups, streams):
        for _ in range(2):
            streams.hold()
            works = [group.all_reduce(torch.ones(4)) for group in groups]
            await eventually(lambda: all(group.host.endpoint.operations for group in groups))
            await eventually(lambda: all(group.desync_detector._posted_receive for group in groups))
            streams.release()
            await asyncio.gather(*works)
            # Otherwise every later call on the host would be slower.
            await eventually(lambda: not any(group.host.endpoint.operations for group in groups))
        assert [group.desync_detector.error for group in groups] == [None] * 2


async def test_refused_call_takes_no_sequence_number():
    async with silent_world(2) as (groups, streams):
        streams[0].captures = True
        with pytest.raises(Exception, match="captured"):
            groups[0].all_reduce(torch.ones(4))
        streams[0].captures = False
        await asyncio.gather(*(group.all_reduce(torch.ones(4)) for group in groups))
        assert [list(group.desync_detector.calls) for group in groups] == [[1, 2], [1, 2]]


async def test_only_the_last_calls_are_kept(monkeypatch):
    monkeypatch.setattr(desync_detector, "_MAX_KEPT_CALLS", 5)
    async with devices_of(1, [Silent]) as [group]:
        for _ in range(20):
            await group.all_reduce(torch.ones(4))
        assert list(group.desync_detector.calls) == list(range(16, 21))


def test_report_interval_grows(monkeypatch):
    monkeypatch.setattr(desync_detector, "_MIN_INTERVAL", 1.0)
    monkeypatch.setattr(desync_detector, "_MAX_INTERVAL", 300.0)
    told = []

    class Reports:
        def send(self, report, peer, tag, timeout):
            told.append(peer)
            return self

        def add_done_callback(self, call):
            pass

    host = type("Host", (), {"_sibling": lambda what: Reports()})
    context = type("Site", (), {"rank": 0, "size": 3, "host": host})
    call = desync_detector.DesyncDetector(context, told.append)
    for number in range(1, 200):
        call.report_call(number, 7, 0.0)
    assert sorted(told) == [1, 2], "once to each neighbour"
