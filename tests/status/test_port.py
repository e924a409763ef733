"""The status port of ranks in this process: authentication, questions that are not legible, and the end of the world."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from unittest.mock import AsyncMock

import pytest
import torch

from asyncdist.config import Config
from asyncdist.errors import AuthenticationError, GroupAbortedError, RendezvousError, StoreConnectionError
from asyncdist.groups import introductions
from asyncdist.kernel.tracing.job_status import job_status
from asyncdist.net import Acceptor, LoopSocket, dial_tcp
from asyncdist.rendezvous import session
from asyncdist.rendezvous.pages import Pages
from asyncdist.status import gathering as gathering_module
from asyncdist.status import port as port_module
from asyncdist.status.discovery import status_security
from asyncdist.status.port import StatusPort
from asyncdist.testing.cluster import world_of

TOKEN = "the token of several jobs"
QUESTION = {"gather": True, "calls": 64, "window": 10.0, "stacks": [], "limit": 20.0}


async def connected(group, token=None, world_id="") -> LoopSocket:
    world = group.world
    security = status_security(world_id or world.endpoint.world_id, token or world.meeting.token, None)
    return await dial_tcp(*world.status_port.address, security)


@contextlib.asynccontextmanager
async def viewed(*ranks, size=1, **options):
    """Yield the groups of a world, and a connection to the status port of each of some ranks."""
    async with world_of(size, **options) as groups:
        with contextlib.ExitStack() as stack:
            yield groups, *[stack.enter_context(contextlib.closing(await connected(groups[rank]))) for rank in ranks]


async def answers(viewer) -> bool:
    return "ranks" in await viewer.ask(QUESTION)


async def refused(host, port):
    """Connect until nothing listens there: another thread closes the port."""
    while True:
        with contextlib.suppress(AuthenticationError, EOFError, ConnectionResetError):
            (await dial_tcp(host, port, status_security("", None, None))).close()


@pytest.mark.parametrize("asked", [0, 2])
async def test_any_rank_answers_for_all(asked):
    async with viewed(asked, size=3) as (groups, viewer):
        await asyncio.gather(*[group.all_reduce(torch.ones(4)) for group in groups])
        pending = [group.barrier() for group in groups[:2]]
        for _ in range(2):
            status = job_status(await viewer.ask(QUESTION), late=0.0)
            assert status.answered_by == asked
            assert [row.state for row in status.rows] == ["pending", "pending", "idle"]
            assert [row.waited_for_by for row in status.rows] == [[], [], [0, 1]]
        await asyncio.gather(*pending, groups[2].barrier())


@pytest.mark.parametrize("size", [5, 9])
async def test_ranks_of_a_large_world_are_asked_in_blocks(monkeypatch, size):
    monkeypatch.setattr(gathering_module, "_DEGREE", 2)
    for asked in range(0, size, 3):
        async with viewed(asked, size=size) as (_, viewer):
            for _ in range(2):
                answer = await viewer.ask(QUESTION)
                assert [each["rank"] for each in answer["ranks"]] == list(range(size))
                assert answer["silent"] == []
                assert len(answer["addresses"]) == size


async def test_another_rank_is_asked_for_a_block_whose_first_rank_is_silent_or_has_no_port(monkeypatch):
    monkeypatch.setattr(gathering_module, "_DEGREE", 2)
    answer_of, never = StatusPort._answer, asyncio.Event()

    async def answer(self, *arguments):
        if self._endpoint.rank == 2:
            await never.wait()
        return await answer_of(self, *arguments)

    monkeypatch.setattr(StatusPort, "_answer", answer)
    async with viewed(0, size=8) as (groups, viewer):
        groups[4].world.status_port.close()
        first, second = [await viewer.ask({**QUESTION, "limit": 1.0}) for _ in range(2)]
        # By another rank of the host they are all seen to live.
        assert [each["rank"] for each in first["ranks"]] == [0, 1, 5, 6, 7]
        assert [rank for rank, *_ in first["silent"]] == [2, 3, 4]
        assert [each["rank"] for each in second["ranks"]] == [0, 1, 3, 5, 6, 7]
        assert [rank for rank, *_ in second["silent"]] == [2, 4]


async def test_rank_that_does_not_know_all_addresses_reads_them_when_it_is_asked(monkeypatch):
    monkeypatch.setattr(session, "BLOCK", 2)
    monkeypatch.setattr(introductions, "MOST_EAGER", 2)
    async with viewed(2, size=12) as (groups, viewer):
        assert groups[2].endpoint.hosts[8] is None
        found = await viewer.ask(QUESTION)
        assert [row["rank"] for row in found["ranks"]] == list(range(12))
        assert not found["silent"]
        assert all(found["addresses"])


async def test_rank_without_addresses_says_so(monkeypatch):
    monkeypatch.setattr(session, "BLOCK", 2)
    monkeypatch.setattr(introductions, "MOST_EAGER", 2)
    monkeypatch.setattr(Pages, "load", AsyncMock(side_effect=StoreConnectionError("the store has ended")))
    async with viewed(2, size=12) as (_, viewer):
        found = await viewer.ask(QUESTION)
        assert [each[:2] for each in found["silent"]] == [[rank, "its address is not known here"] for rank in (8, 9)]


async def test_rank_answers_after_its_group_has_failed():
    async with world_of(2) as groups:
        waiting = groups[1].barrier()
        groups[0].abort("the test aborts")
        with pytest.raises(GroupAbortedError):
            await waiting
        with contextlib.closing(await connected(groups[0])) as viewer:
            status = job_status(await viewer.ask(QUESTION))
        assert [row.state for row in status.rows] == ["failed", "failed"]
        assert status.rows[1].reason == "rank 0 aborted: the test aborts"


async def test_wrong_token_and_other_protocols_are_refused_and_the_port_goes_on():
    async with world_of(1) as groups:
        with pytest.raises(AuthenticationError, match=r"the status port of world .* refused the token"):
            await connected(groups[0], "guess")
        reader, writer = await asyncio.open_connection(*groups[0].world.status_port.address)
        writer.write(b"GET / HTTP/1.1\r\nHost: somebody\r\nAccept: everything\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        with contextlib.closing(await connected(groups[0])) as viewer:
            assert await answers(viewer)


async def test_proof_for_another_world_of_the_same_token_is_refused():
    async with world_of(1, config=Config(token=TOKEN)) as groups, world_of(1, config=Config(token=TOKEN)) as others:
        with pytest.raises(AuthenticationError, match="refused the token"):
            await connected(groups[0], TOKEN, others[0].world.endpoint.world_id)
        with contextlib.closing(await connected(groups[0], TOKEN)) as viewer:
            assert (await viewer.ask(QUESTION))["world"] == groups[0].world.endpoint.world_id


async def test_silent_connections_give_way_to_a_viewer(monkeypatch):
    monkeypatch.setattr(port_module, "_MOST_HANDSHAKES", 4)
    async with world_of(1) as groups:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(socket.create_connection(groups[0].world.status_port.address))
            with contextlib.closing(await connected(groups[0])) as viewer:
                assert await answers(viewer)


async def test_viewer_that_has_been_idle_for_longest_gives_way(monkeypatch):
    monkeypatch.setattr(port_module, "_MOST_VIEWERS", 3)
    async with viewed(0, 0, 0) as (groups, *viewers):
        for viewer in (viewers[1], viewers[2], viewers[0]):
            await viewer.ask(QUESTION)
        with contextlib.closing(await connected(groups[0])) as newest:
            for viewer in (newest, viewers[0], viewers[2]):
                assert await answers(viewer)
        with pytest.raises((EOFError, OSError)):
            await viewers[1].ask(QUESTION)


async def test_rank_whose_connection_of_a_gathering_was_evicted_is_asked_on_a_new_one(monkeypatch):
    monkeypatch.setattr(port_module, "_MOST_VIEWERS", 1)
    async with viewed(0, size=2) as (groups, first):
        assert not (await first.ask(QUESTION))["silent"]
        with contextlib.closing(await connected(groups[1])) as second:
            assert (await second.ask({**QUESTION, "gather": False}))["rank"] == 1
        assert not (await first.ask(QUESTION))["silent"]


@pytest.mark.parametrize("question", [{}, {"gather": True}, [1], None, {**QUESTION, "calls": "all"}])
async def test_illegible_question_is_answered_with_an_error(question):
    async with viewed(0) as (_, viewer):
        assert "the question is not legible" in (await viewer.ask(question))["error"]
        assert await answers(viewer)


async def test_question_that_is_too_long_ends_its_connection_and_no_other(caplog, monkeypatch):
    monkeypatch.setattr(port_module, "_MOST_QUESTION_NBYTES", 1000)
    async with viewed(0, 0) as (_, viewer, other):
        with pytest.raises((EOFError, OSError)):
            await viewer.ask({"calls": "x" * 1000})
        assert await answers(other)
    gc.collect()
    assert "rank 0: the status port ended a connection" in caplog.text
    assert "never retrieved" not in caplog.text


async def test_port_ends_with_its_world():
    async with world_of(1) as groups:
        viewer, address = await connected(groups[0]), groups[0].world.status_port.address
    with contextlib.closing(viewer), pytest.raises((EOFError, OSError)):
        await viewer.ask(QUESTION)
    with pytest.raises(OSError):
        await refused(*address)


async def test_port_that_is_closed_before_it_accepts_leaves_no_socket(monkeypatch):
    async with world_of(1) as groups:
        port = StatusPort("127.0.0.1", Config())

        def close_before(*args, **options):
            asyncio.get_running_loop().call_soon(port.close)
            return Acceptor(*args, **options)

        monkeypatch.setattr(port_module, "Acceptor", close_before)
        port.serve(groups[0].world.endpoint, [], dict, AsyncMock())
        with pytest.raises(OSError):
            await refused(*port.address)


async def test_first_viewer_is_answered_once_the_process_can_start_a_loop(monkeypatch, caplog):
    start, failures = port_module.observing_loop, [RendezvousError("no descriptor"), RuntimeError("no thread")]

    def fail_first():
        if failures:
            raise failures.pop()
        return start()

    monkeypatch.setattr(port_module, "observing_loop", fail_first)
    monkeypatch.setattr(port_module, "ACCEPT_AGAIN", 0.01)
    async with viewed(0) as (_, viewer):
        assert await answers(viewer)
    assert failures == []
    assert caplog.text.count("the status port cannot answer, and tries again") == 2


async def test_answer_that_fails_is_logged_and_ends_its_connection_alone(caplog, monkeypatch):
    async with viewed(0, 0) as (groups, viewer, other):
        with monkeypatch.context() as patched:
            patched.setattr(groups[0].world.endpoint.recorder, "content", lambda *_, **__: 1 / 0)
            with pytest.raises((EOFError, OSError)):
                await viewer.ask(QUESTION)
        assert await answers(other)
    assert "the status port failed to handle a connection" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_rank_without_a_port_opens_none():
    async with world_of(2, config=Config(status=False)) as groups:
        assert [group.world.status_port for group in groups] == [None, None]
        assert groups[0].world.status_record() == b""
