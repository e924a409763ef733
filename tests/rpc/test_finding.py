"""Names: finding who serves them, one or all, by rank, when they come and go; and calls to all."""

import asyncio
import contextlib
import functools

import pytest
import torch

from asyncdist import rpc
from asyncdist.config import Config
from asyncdist.errors import AuthenticationError, PeerLostError, UsageError
from asyncdist.net.connection.handshake import ChannelAddress
from asyncdist.rendezvous.directory import JobDirectory, PeerRecord
from asyncdist.rpc.values import Carrier
from asyncdist.rpc.wire import VERSION
from asyncdist.store import StoreServer

QUICK = Config(timeout=60.0)
serve, connect = (functools.partial(open_session, config=QUICK) for open_session in (rpc.serve, rpc.connect))


class Member:
    def __init__(self, number):
        self.number = number
        self.cancelled = asyncio.Event()

    async def who(self):
        return self.number

    async def add(self, tensor):
        return tensor + self.number

    async def odd_fails(self):
        if self.number % 2:
            raise ValueError(f"{self.number} is odd")
        return self.number

    async def wait(self):
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def stream(self):
        yield self.number


async def test_find_waits_until_somebody_serves(job):
    async with connect(job):
        finding = asyncio.ensure_future(rpc.find("late"))
        await asyncio.sleep(0.01)
        assert not finding.done()
        async with serve({"late": Member(1)}, job):
            assert await (await finding).who() == 1


async def test_process_that_calls_by_another_version_is_not_found(job, monkeypatch):
    monkeypatch.setattr("asyncdist.rpc.session.VERSION", VERSION + 1)
    async with serve({"it": Member(0)}, job):
        monkeypatch.undo()
        async with connect(job):
            for _ in range(2):
                with pytest.raises(
                    rpc.NameNotFoundError, match=f"makes calls of version {VERSION + 1}, and this process of {VERSION}"
                ):
                    await rpc.find("it", timeout=0.1)


async def test_find_that_finds_nobody_says_what_it_saw(job):
    async with serve({"it": Member(0)}, job, rank=0), connect(job) as session:
        with pytest.raises(
            rpc.NameNotFoundError, match=r"after 0\.05 s no process serves 'other' in .*no process has p"
        ):
            await rpc.find("other", timeout=0.05)
        with pytest.raises(rpc.NameNotFoundError, match=r"'it of rank 3' .*there are: rank 0 \(process"):
            await session.find("it", rank=3, timeout=0.05)
        await session.find("it")  # the connection may take longer
        with pytest.raises(rpc.NameNotFoundError, match="1 objects answer, of 2"):
            await session.find_all("it", count=2, timeout=0.2)
        assert await session.names() == ["it"]


async def test_rank_chooses_the_process(job):
    async with serve({"it": Member(7)}, job, rank=7), serve({"it": Member(3)}, job, rank=3), connect(job):
        assert await (await rpc.find("it")).who() in (3, 7)
        found = await rpc.find("it", rank=3)
        assert (await found.who(), found.rank) == (3, 3)


async def test_all_objects_of_all_processes_are_called_in_order(job):
    async with (
        serve({"it": [Member(2), Member(3)]}, job, rank=1),
        serve({"it": [Member(0), Member(1)]}, job, rank=0),
        serve({"it": Member(4)}, job),
        connect(job),
    ):
        members = await rpc.find_all("it", count=5)
        assert len(members) == 5
        assert await members.who() == [0, 1, 2, 3, 4]
        found = await members.add(torch.zeros(100_000))
        assert [int(tensor[-1]) for tensor in found] == [0, 1, 2, 3, 4]
        assert await members[2:4].who() == [2, 3]
        assert await members[1].who() == 1
        assert [await anext(aiter(stream)) for stream in await members.stream()] == [0, 1, 2, 3, 4]
        assert await members[:0].who() == []


async def test_partial_failure_has_the_results_and_who_failed_why(job):
    async with serve({"it": [Member(number) for number in range(5)]}, job), connect(job):
        members = await rpc.find_all("it")
        with pytest.raises(rpc.PartialError, match=r"2 of 5 failed: it\[1\].odd_fails.*1 is odd") as caught:
            await members.odd_fails()
        assert caught.value.results == [0, None, 2, None, 4]
        assert [type(error).__name__ for error in caught.value.failures.values()] == ["RemoteError"] * 2
        assert sorted(caught.value.failures) == [1, 3]
        assert isinstance(caught.value.failures[1], ValueError)
        with pytest.raises(rpc.PartialError, match="no result within"):
            await members.wait(timeout=0.05)
        with pytest.raises(UsageError, match="at 5 objects"):
            members.add(object())


async def test_long_arguments_of_a_call_to_all_are_packed_once(job, monkeypatch):
    packed = []
    pack_aside = Carrier.pack_aside
    monkeypatch.setattr(Carrier, "pack_aside", lambda *args: packed.append(1) or pack_aside(*args))
    async with serve({"it": [Length(), Length()]}, job), serve({"it": Length()}, job), connect(job):
        lengths = await rpc.find_all("it", count=3)
        assert await lengths.of([(number,) for number in range(40_000)]) == [40_000] * 3
        assert packed == [1]
        with pytest.raises(rpc.PartialError, match=r"3 of 3 failed.*cannot be sent as plain data"):
            await lengths.of([*[()] * 40_000, object()])


class Length:
    """Measures what it gets."""

    async def of(self, value):
        return len(value)


async def test_cancelled_call_to_all_cancels_all(job):
    objects = [Member(number) for number in range(3)]
    async with serve({"it": objects}, job), connect(job):
        task = asyncio.ensure_future((await rpc.find_all("it")).wait())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for each in objects:
            await each.cancelled.wait()


async def test_watch_tells_who_comes_and_goes_also_after_a_limit_that_passed(job):
    async with connect(job) as session, session.watch("it") as changes:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(changes), 0.01)
        async with serve({"it": Member(0)}, job, rank=5):
            come = await anext(changes)
            assert come.record.about["rank"] == 5
        gone = await anext(changes)
        assert (gone.id, gone.record) == (come.id, None)


@contextlib.asynccontextmanager
async def silent_process(job, name):
    """Publish a process that accepts connections and does not answer, as one that is stopped; yield its connections.

    Its record comes before all others.
    """
    connections = []

    async def keep(reader, writer):
        connections.append(writer)

    async with await asyncio.start_server(keep, "127.0.0.1", 0) as server:
        directory = await JobDirectory.open(job, "rpc", config=QUICK)
        port = server.sockets[0].getsockname()
        address = ChannelAddress("!", "the silent process", "another host", 0, 0, "", port[:2])
        await directory.publish(PeerRecord(name, address, {"rank": None, "count": 1}))
        try:
            yield connections
        finally:
            await directory.close()
            for writer in connections:
                writer.close()


async def test_process_that_does_not_answer_is_passed_over(job):
    async with silent_process(job, "it") as connections, serve({"it": Member(3)}, job), connect(job):
        assert await (await rpc.find("it")).who() == 3
        assert connections
        # A handshake has 20 seconds, and the caller fewer.
        assert await (await rpc.find_all("it", timeout=0.5)).who() == [3]
        with pytest.raises(rpc.NameNotFoundError, match="1 objects answer, of 2"):
            await rpc.find_all("it", count=2, timeout=0.5)


async def test_handshake_that_takes_too_long_is_no_timeout_of_the_caller(job):
    impatient = Config(timeout=60.0, handshake_timeout=0.1)
    async with silent_process(job, "it"), rpc.connect(job, config=impatient):
        finding = asyncio.ensure_future(rpc.find("it"))
        finding_all = asyncio.ensure_future(rpc.find_all("it"))
        with pytest.raises(
            rpc.NameNotFoundError, match=r"the silent process was lost .it did not answer within 0\.1 s"
        ):
            await rpc.find("it", timeout=1)
        async with serve({"it": Member(3)}, job):
            assert await (await finding).who() == 3
            assert await (await finding_all).who() == [3]


@pytest.mark.parametrize("find", ["find", "find_all"])
async def test_process_that_refuses_the_first_connections_is_tried_again(job, monkeypatch, find):
    """Its record does not change."""
    refused = []

    async def refuse(sock, *args):
        sock.close()
        refused.append(sock)
        if len(refused) == 3:
            monkeypatch.undo()
        raise EOFError

    async with serve({"it": Member(3)}, job), connect(job) as session:
        monkeypatch.setattr("asyncdist.net.connection.port.accept", refuse)
        found = await getattr(session, find)("it")
        assert await found.who() == (3 if find == "find" else [3])
        assert len(refused) == 3


async def test_session_that_ends_ends_the_calls_to_it(job):
    async with connect(job):
        member = Member(0)
        async with serve({"it": member}, job):
            it = await rpc.find("it")
            waiting = it.wait()
            await it.who()
        with pytest.raises(rpc.CalleeLostError, match="has closed the channel: its session has ended") as caught:
            await waiting
        assert caught.value.may_have_run
        await member.cancelled.wait()
        with pytest.raises(rpc.CalleeLostError, match="the method has not run") as caught:
            await it.who()
        assert not caught.value.may_have_run
        assert isinstance(caught.value, PeerLostError)
        with pytest.raises(rpc.NameNotFoundError):
            await rpc.find("it", timeout=0.05)


async def test_call_after_the_end_of_the_own_session_says_so(job):
    async with serve({"it": Member(0)}, job):
        async with connect(job) as session:
            it = await session.find("it")
        with pytest.raises(rpc.CalleeLostError) as caught:
            await it.who()
    assert "its session has ended; the method has not run; make calls inside the `async with`" in str(caught.value)
    assert "was lost" not in str(caught.value)


async def test_call_on_another_loop_is_refused(job):
    async def awaited(it):
        await it.who()

    async with serve({"it": Member(0)}, job) as session:
        it = await rpc.find("it")
        for call in (it.who, lambda: asyncio.run(awaited(it))):
            with pytest.raises(UsageError, match=r"it\.who\(\) at .* is open on another loop; call it in a coroutine"):
                await asyncio.to_thread(call)
        assert await it.who() == 0
        assert repr(session) == f"<RpcSession of '{job}', serves 'it'>"
    assert repr(session).endswith("not open>")


async def test_call_of_a_plain_method_that_arrives_while_the_session_ends_is_lost_quietly(job):
    class Plain:
        def run(self):
            return 1

    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    async with connect(job):
        async with serve({"it": Plain()}, job) as session:
            it = await rpc.find("it")
            assert await it.run() == 1
            # As after the first step of the end of the session.
            session.threads.shutdown(wait=False, cancel_futures=True)
            late = it.run()
            with pytest.raises(rpc.CallTimeoutError):
                await it.run(timeout=0.05)
        with pytest.raises(rpc.CalleeLostError, match="its session has ended"):
            await late
    assert failures == []


async def test_session_that_is_not_open_says_so(job):
    session = rpc.connect(job)

    async def use_session():
        with pytest.raises(UsageError, match="is not open: use it inside its `async with` block"):
            session.watch("name")
        with pytest.raises(UsageError, match="is not open"):
            session.refer([])
        for calling in (session.find("name"), session.find_all("name"), session.names()):
            with pytest.raises(UsageError, match="is not open"):
                await calling

    await use_session()
    async with session:
        assert await session.names() == []
    await use_session()


async def test_without_a_session_or_with_wrong_arguments_nothing_is_done(job):
    with pytest.raises(UsageError, match="no session for remote calls is open on this loop"):
        await rpc.find("it")
    with pytest.raises(UsageError, match="served under names, and Member is not a dict of objects"):
        serve(Member(0), job)
    with pytest.raises(UsageError, match="names that are texts"):
        serve({3: Member(0)}, job)
    with pytest.raises(UsageError, match="no object is served under the name 'it'"):
        serve({"it": []}, job)
    with pytest.raises(UsageError, match="at least one thread"):
        serve({}, job, threads=0)
    session = connect(job)
    async with session:
        with pytest.raises(UsageError, match="entered once"):
            await session.__aenter__()
        for call in (session.find, session.find_all):
            with pytest.raises(UsageError, match="names are texts, and 3 is none"):
                await call(3)
        with pytest.raises(UsageError, match="rank is a whole number, not '0'"):
            await session.find("it", rank="0")
    with pytest.raises(AuthenticationError, match="the store refused the token"):
        async with rpc.connect(job, config=Config(token="another")):
            raise AssertionError


async def test_served_objects_are_found_again_in_the_store_that_follows_a_lost_one():
    server = await StoreServer.start("127.0.0.1", 0)
    job = f"asyncdist://127.0.0.1:{server.port}/job"
    async with serve({"it": Member(3)}, job):
        await server.close()
        server = await StoreServer.start("127.0.0.1", server.port)
        async with rpc.connect(job) as newcomer:
            assert await (await newcomer.find("it")).who() == 3
    await server.close()


def test_objects_without_names_are_refused():
    with pytest.raises(UsageError, match="served under names, and Member is not a dict of objects"):
        rpc.serve(Member(0), "asyncdist://127.0.0.1:1/test")


async def test_object_calls_its_caller_back(job):
    class Server:
        async def ask(self, name):
            return await (await rpc.find(name)).who()

    async with serve({"server": Server()}, job), serve({"client": Member(9)}, job):
        assert await (await rpc.find("server")).ask("client") == 9
