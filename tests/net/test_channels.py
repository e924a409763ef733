"""Channels between two ports of this process: order, long messages, memory, descriptors, strangers, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import gc
import os
import select
import socket
import struct
import sys
import termios

import numpy as np
import pytest
import uvloop

from asyncdist.errors import AuthenticationError, PeerLostError, ProtocolError, SharedMemoryError, UsageError
from asyncdist.net.admission import EvictingQueue
from asyncdist.net.connection import frames
from asyncdist.net.connection.outbox import Outbox
from tests.support.channels import (
    CARRIERS,
    Recorder,
    channel_pair,
    place,
    port_of,
    read_again,
    settings_of,
    socket_of,
    stop_reading,
    tls_settings,
)  # fmt: skip

LONG = 3 * frames.CHUNK_NBYTES + 17
each_carrier = pytest.mark.parametrize("over", CARRIERS)


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


@pytest.mark.each_loop
@each_carrier
async def test_messages_of_all_lengths_arrive_in_both_directions(over):
    async with channel_pair(over) as (near, ours, far, theirs):
        assert near.is_local == (over == "unix")
        sizes = [0, 1, frames.SHORT_NBYTES - 1, frames.SHORT_NBYTES, LONG, 5 << 20]
        sent = [(b"%d" % size, [random_bytes(size), b"", random_bytes(3)]) for size in sizes]
        for channel, handler in ((near, theirs), (far, ours)):
            for head, buffers in sent:
                await channel.deliver(head, [memoryview(each) for each in buffers])
            assert sorted(await handler.until(len(sent))) == sorted(sent)


@each_carrier
async def test_many_short_messages_keep_their_order(over):
    async with channel_pair(over) as (near, _, _, theirs):
        heads = [b"%d" % number * (number % 50) for number in range(20_000)]
        for head in heads:
            near.send(head)
        assert [head for head, _ in await theirs.until(len(heads))] == heads


@each_carrier
async def test_short_message_passes_a_long_one_whose_place_is_known(over):
    async with channel_pair(over) as (near, _, _, theirs):
        data = random_bytes(16 << 20)
        near.send(b"long", [memoryview(data)])
        near.send(b"short")
        await theirs.until(1)
        assert theirs.events == ["opened long"]
        assert theirs.messages == [(b"short", [])]
        await theirs.until(2)
        assert theirs.messages[1] == (b"long", [data])


@each_carrier
async def test_long_messages_share_the_channel(over):
    async with channel_pair(over) as (near, _, _, theirs):
        near.send(b"longer", [memoryview(random_bytes(16 << 20))])
        near.send(b"long", [memoryview(random_bytes(1 << 20))])
        await theirs.until(2)
        assert theirs.events == ["opened longer", "opened long", "completed long", "completed longer"]


@each_carrier
async def test_dropped_message_and_memory_of_another_size_end_with_an_error(over):
    async with channel_pair(over) as (near, _, _, theirs):
        theirs.refused[b"refused"] = UsageError("not now")
        theirs.memory[b"small"] = [memoryview(bytearray(3))]
        memory = bytearray(LONG)
        theirs.memory[b"good"] = [memoryview(memory)]
        data = memoryview(random_bytes(LONG))
        for head in (b"refused", b"small", b"good"):
            near.send(head, [data])
        await theirs.until(3)
        good, refused, small = sorted(theirs.events[3:])
        assert good == "completed good"
        assert memory == data
        assert refused.startswith("not now")
        assert small.startswith("the memory for")


@each_carrier
async def test_memory_that_is_withdrawn_in_the_middle_is_written_no_more(over):
    async with channel_pair(over) as (near, _, far, theirs):
        memory = np.zeros(16 << 20, dtype=np.uint8)
        theirs.memory[b"head"] = [memory.data]
        near.send(b"head", [memoryview(b"\1" * len(memory))])
        while not memory[0]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        (message,) = theirs.openings
        far.drop(message, UsageError("the caller has gone"))
        arrived = int(memory.sum())
        await theirs.until(1)
        assert 0 < arrived == int(memory.sum()) < len(memory)
        assert theirs.messages == [(b"head", [])]


@each_carrier
async def test_sender_withdraws_a_long_message(over):
    async with channel_pair(over) as (near, _, _, theirs):
        message = near.send(b"head", [memoryview(bytearray(16 << 20))])
        await theirs.when(lambda: theirs.events)
        near.withdraw(message)
        near.withdraw(message)
        assert message.done
        await theirs.when(lambda: len(theirs.events) == 2)
        assert theirs.events == ["opened head", "withdrawn head"]
        data = random_bytes(LONG)
        await near.deliver(b"next", [memoryview(data)])
        assert await theirs.until(1) == [(b"next", [data])]


@each_carrier
async def test_all_of_many_messages_of_one_part_are_delivered(over):
    """The socket is full in the middle of some of them."""
    async with channel_pair(over) as (near, _, far, theirs):
        data = memoryview(random_bytes(frames.CHUNK_NBYTES))
        stop_reading(far)
        deliveries = [asyncio.create_task(near.deliver(b"%d" % number, [data])) for number in range(64)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert not all(each.done() for each in deliveries)
        read_again(far)
        await theirs.until(len(deliveries))
        await asyncio.wait_for(asyncio.gather(*deliveries), 20)


async def test_cancelled_delivery_withdraws_its_message():
    async with channel_pair() as (near, _, _, theirs):
        task = asyncio.ensure_future(near.deliver(b"head", [memoryview(bytearray(16 << 20))]))
        await theirs.when(lambda: theirs.events)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await theirs.when(lambda: theirs.events[-1] == "withdrawn head")


async def test_memory_may_change_when_the_message_is_done():
    async with channel_pair("tcp") as (near, _, _, theirs):
        data = bytearray(b"\1" * (8 << 20))
        await near.deliver(b"head", [memoryview(data)])
        data[:] = bytes(len(data))
        (_, [received]) = (await theirs.until(1))[0]
        assert received == b"\1" * len(data)


async def test_descriptors_come_with_short_messages():
    async with channel_pair() as (near, _, _, theirs):
        for number in range(2):
            descriptor = os.memfd_create("test")
            os.write(descriptor, b"content %d" % number)
            near.send(b"head", [memoryview(bytes(number))], [descriptor])
            os.close(descriptor)
        await theirs.until(2)
        assert [os.pread(each, 20, 0) for each in theirs.descriptors] == [b"content 0", b"content 1"]
        for each in theirs.descriptors:
            os.close(each)


async def test_descriptors_are_refused_between_hosts_with_long_messages_and_in_great_numbers():
    async with channel_pair("tcp") as (near, *_):
        with pytest.raises(UsageError, match="only to a process on this host"):
            near.send(b"", descriptors=[0])
    async with channel_pair() as (near, *_):
        with pytest.raises(UsageError, match="at most 16 descriptors"):
            near.send(b"", descriptors=[0] * 17)
        with pytest.raises(UsageError, match="at most 32768 bytes"):
            near.send(b"", [memoryview(bytes(LONG))], [0])


async def test_message_beyond_the_limits_is_refused_by_its_sender():
    async with channel_pair(max_message_nbytes=1 << 20) as (near, _, _, theirs):
        for head, buffers in ((bytes(frames.SHORT_NBYTES + 1), []), (b"", [memoryview(bytes(2 << 20))])):
            with pytest.raises(UsageError, match="ASYNCDIST_MAX_MESSAGE_NBYTES"):
                near.send(head, buffers)
        near.send(b"good")
        assert await theirs.until(1) == [(b"good", [])]


# -- back-pressure --------------------------------------------------------------------------------------


async def congest(near, far):
    """Let ``far`` stop reading, and send until ``near`` is congested; return the number of messages."""
    stop_reading(far)
    count = 0
    while not near.is_congested:
        near.send(bytes(frames.SHORT_NBYTES))
        count += 1
        await asyncio.sleep(0)
    return count


@each_carrier
async def test_sender_is_congested_while_the_peer_does_not_read(over):
    async with channel_pair(over) as (near, _, far, theirs):
        count = await congest(near, far)
        draining = asyncio.ensure_future(near.drain())
        await asyncio.sleep(0.01)
        assert not draining.done()
        read_again(far)
        await draining
        await theirs.until(count)


async def test_short_message_whose_delivery_is_cancelled_in_a_congestion_is_sent():
    async with channel_pair("tcp") as (near, _, far, theirs):
        count = await congest(near, far)
        delivery = asyncio.create_task(near.deliver(b"short"))
        await asyncio.sleep(0)
        delivery.cancel()
        with pytest.raises(asyncio.CancelledError):
            await delivery
        read_again(far)
        assert (await theirs.until(count + 1))[-1] == (b"short", [])


async def test_end_of_the_channel_ends_waits_and_long_messages():
    async with channel_pair("tcp") as (near, _, far, _):
        stop_reading(far)
        message = near.send(b"long", [memoryview(bytearray(16 << 20))])
        while not near.is_congested:
            near.send(bytes(frames.SHORT_NBYTES))
            await asyncio.sleep(0)
        draining = asyncio.ensure_future(near.drain())
        await asyncio.sleep(0)
        near.fail("the test says so")
        with pytest.raises(PeerLostError, match="the test says so"):
            await draining
        assert message.done
        assert isinstance(message.error, PeerLostError)
        with pytest.raises(PeerLostError, match="the test says so"):
            near.send(b"")


# -- the end --------------------------------------------------------------------------------------------


@each_carrier
async def test_goodbye_comes_after_what_was_sent_before(over):
    async with channel_pair(over) as (near, _, _, theirs):
        data = random_bytes(8 << 20)
        near.send(b"long", [memoryview(data)])
        near.send(b"short")
        await near.close("the work is done")
        await theirs.when(lambda: theirs.errors)
        assert sorted(theirs.messages) == [(b"long", [data]), (b"short", [])]
        assert "it has closed the channel: the work is done" in str(theirs.errors[0])
        await near.close()


@pytest.mark.each_loop
async def test_messages_before_a_reset_arrive_although_no_loop_reports_more(eventually):
    # uvloop calls the reader of a broken connection once, and these messages take several reads.
    async with channel_pair("tcp", heartbeat=0.0) as (near, _, far, theirs):
        stop_reading(far)
        for number in range(3):
            near.send(b"%d" % number, [memoryview(random_bytes(30_000))])
        await eventually(lambda: num_unread(far) > 90_000)
        socket_of(near).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        near.leave("the test says so")
        await eventually(lambda: is_reset(far))
        read_again(far)
        await theirs.when(lambda: theirs.errors)
        assert [head for head, _ in theirs.messages] == [b"%d" % number for number in range(3)]


def num_unread(channel):
    """Return the bytes that have arrived for a channel and that it has not read."""
    return int.from_bytes(fcntl.ioctl(socket_of(channel).fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)


def is_reset(channel):
    """Return whether a connection is broken."""
    poll = select.poll()
    poll.register(socket_of(channel).fileno(), 0)
    return bool(poll.poll(0))


async def test_broken_connection_is_no_goodbye():
    async with channel_pair() as (near, ours, far, theirs):
        near.send(b"long", [memoryview(bytearray(16 << 20))])
        await theirs.when(lambda: theirs.events)
        socket_of(near).shutdown(socket.SHUT_RDWR)
        await theirs.when(lambda: theirs.errors)
        await ours.when(lambda: ours.errors)
        assert "it has closed" not in str(theirs.errors[0])
        assert theirs.errors[0].peer == far.peer.name
        assert theirs.events == ["opened long"]


async def test_channel_is_shared_and_opened_again_after_its_end():
    async with port_of(Recorder()) as dialling, port_of(Recorder()) as accepting:
        first, second = await asyncio.gather(*[dialling.connect(accepting.address) for _ in range(2)])
        assert first is second is await dialling.connect(accepting.address)
        await first.close()
        third = await dialling.connect(accepting.address)
        assert third is not first
        assert third.is_open


@each_carrier
async def test_ended_port_is_a_lost_peer(over):
    settings = settings_of(over)
    async with port_of(Recorder(), host="here", **settings) as dialling:
        async with port_of(Recorder(), host=place(over), **settings) as accepting:
            address = accepting.address
        with pytest.raises(PeerLostError, match="cannot be reached"):
            await dialling.connect(address)
        with pytest.raises(PeerLostError, match="cannot be reached"):
            await dialling.connect(address)


async def test_connection_that_fails_when_nobody_waits_for_it_any_more_is_not_logged(caplog, eventually, monkeypatch):
    begun, may_fail = asyncio.Event(), asyncio.Event()

    async def refuse(*arguments):
        begun.set()
        await may_fail.wait()
        raise ConnectionRefusedError

    monkeypatch.setattr("asyncdist.net.connection.port.dial", refuse)
    async with port_of(Recorder()) as dialling, port_of(Recorder()) as accepting:
        waiter = asyncio.create_task(dialling.connect(accepting.address))
        await begun.wait()
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        may_fail.set()
        await eventually(lambda: all(task.get_name() != "asyncdist-dial" for task in asyncio.all_tasks()))
        gc.collect()
    assert "never retrieved" not in caplog.text


async def test_receiver_that_cannot_map_shared_memory_gets_messages_and_the_sender_keeps_none(monkeypatch, eventually):
    def fail(*arguments):
        raise SharedMemoryError("no address space is left")

    monkeypatch.setattr("asyncdist.net.connection.inbox.StagedParts", fail)
    async with channel_pair() as (near, _, _, theirs):
        data = random_bytes(4 << 20)
        for count in (1, 2):
            await near.deliver(b"head", [memoryview(data)])
            assert (await theirs.until(count))[-1] == (b"head", [data])
        await eventually(lambda: _staging_descriptors() == 0)


async def test_end_of_a_channel_in_the_middle_of_a_message_leaves_no_shared_memory(monkeypatch, eventually):
    """The handler ends the channel when the last piece has arrived, and keeps the channel."""
    async with channel_pair() as (near, _, far, theirs):
        await near.deliver(b"first", [memoryview(random_bytes(LONG))])
        await theirs.until(1)
        assert _staging_descriptors() == 2
        completed = theirs.completed

        def complete_and_end(channel, message):
            completed(channel, message)
            channel.fail("the test ends it")

        monkeypatch.setattr(theirs, "completed", complete_and_end)
        # The last piece may count as delivered before the end is known here.
        with contextlib.suppress(PeerLostError):
            await near.deliver(b"last", [memoryview(random_bytes(LONG))])
        await theirs.until(2)
        await eventually(lambda: not near.is_open)
        assert not far.is_open
        assert _staging_descriptors() == 0


def _staging_descriptors() -> int:
    """The descriptors of staging areas, of which a mapping keeps one."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += "asyncdist-channel" in os.readlink(f"/proc/self/fd/{name}")
    return found


@pytest.mark.each_loop
@pytest.mark.parametrize("turns", range(4))
async def test_cancelled_close_of_a_port_leaves_nothing_open(turns):
    """The close waits at each turn of the loop for something else: tasks, then channels whose peers do not read."""
    ours, theirs = Recorder(), Recorder()
    async with port_of(theirs, host="there") as accepting:
        dialling = port_of(ours, host="here")
        channel = await dialling.connect(accepting.address)
        channel.send(b"head", [memoryview(bytearray(64 << 20))])
        closing = asyncio.create_task(dialling.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        if turns:  # else the task has not begun
            assert not channel.is_open
            await theirs.when(lambda: theirs.errors)
        await dialling.close()
        assert socket_of(channel).fileno() == -1


@pytest.mark.each_loop
async def test_end_of_a_port_before_a_handshake_has_begun_leaves_no_socket(monkeypatch):
    accepting, closing, add = port_of(Recorder(), host="here"), [], EvictingQueue.add

    def close_before(queue, handshake):
        closing.append(asyncio.create_task(accepting.close()))
        add(queue, handshake)

    monkeypatch.setattr(EvictingQueue, "add", close_before)
    reader, writer = await asyncio.open_connection(*accepting.address.tcp)
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()
    await closing[0]


async def test_address_of_an_ended_port_that_another_has_now_is_refused():
    async with port_of(Recorder()) as dialling, port_of(Recorder()) as accepting:
        with pytest.raises(ProtocolError, match="which has ended"):
            await dialling.connect(dataclasses.replace(accepting.address, id="another"))


# -- strangers ------------------------------------------------------------------------------------------


@each_carrier
async def test_wrong_token_is_refused_and_the_port_goes_on(over):
    where, settings = place(over), settings_of(over)
    async with port_of(Recorder(), host="here", **settings) as accepting:
        async with port_of(Recorder(), host=where, token="guess", **settings) as stranger:
            with pytest.raises(AuthenticationError, match="test of job '' refused the token"):
                await stranger.connect(accepting.address)
        async with port_of(Recorder(), host=where, **settings) as friend:
            assert (await friend.connect(accepting.address)).is_open


async def test_other_protocol_and_silence_are_refused():
    async with port_of(Recorder(), handshake_timeout=0.1) as accepting:
        reader, writer = await asyncio.open_connection(*accepting.address.tcp)
        writer.write(b"GET / HTTP/1.1\r\nHost: somebody\r\nAccept: everything\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        reader, writer = await asyncio.open_connection(*accepting.address.tcp)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    "damaged",
    [
        frames.pack_opening(1, b"", [1 << 60]),
        frames.HEADER.pack(1 << 31, frames.SHORT, 0, 0),
        frames.HEADER.pack(4, 77, 0, 0) + b"abcd",
        frames.frame(frames.CHUNK, frames.NUMBER.pack(5) + b"data of no message"),
        frames.frame(frames.PIECE, frames.PIECE_BODY.pack(1, 1, 1)),
        frames.frame(frames.PIECE, b"short"),
        frames.frame(frames.WITHDRAWN, frames.NUMBER.pack(9)),
        frames.frame(frames.STAGING, frames.STAGING_BODY.pack(8, 1 << 20)),
        frames.frame(frames.CHUNK, frames.NUMBER.pack(5)),
        frames.pack_opening(1, b"", [5]) + frames.frame(frames.CHUNK, frames.NUMBER.pack(1) + b"six ->"),
        frames.pack_opening(1, b"", [5]) * 2,
        frames.HEADER.pack(3, frames.SHORT, 3, 0) + b"abc",
        frames.HEADER.pack(8, frames.SHORT, 0, 1) + b"\xff\xff\xff\0abcd",
    ],
)  # fmt: skip
async def test_damaged_frames_end_their_channel_and_no_other(damaged, caplog):
    async with channel_pair() as (near, ours, _, theirs):
        socket_of(near).send(damaged)
        await theirs.when(lambda: theirs.errors)
        await ours.when(lambda: ours.errors)
        assert "this peer was given up" in str(ours.errors[0])
        assert (await ours.port.connect(theirs.port.address)).is_open


async def test_returned_slots_that_the_peer_does_not_have_end_the_channel():
    async with channel_pair() as (near, ours, far, theirs):
        await near.deliver(b"long", [memoryview(bytearray(4 << 20))])
        await theirs.until(1)
        socket_of(far).send(frames.frame(frames.SLOTS_FREE, b"\xff"))
        await ours.when(lambda: ours.errors)


@pytest.mark.parametrize(
    "error", [ProtocolError("it speaks another version"), ZeroDivisionError()], ids=["refuses", "fails"]
)
@pytest.mark.parametrize("is_dialling", [True, False], ids=["dialling", "accepting"])
async def test_handler_that_refuses_a_peer_ends_its_channel(error, is_dialling, eventually):
    ours, theirs = Recorder(), Recorder()

    def refuse(channel):
        raise error

    (ours if is_dialling else theirs).connected = refuse
    async with port_of(ours) as dialling, port_of(theirs) as accepting:
        for number in (1, 2):
            with pytest.raises(PeerLostError) if is_dialling else contextlib.suppress(PeerLostError):
                await dialling.connect(accepting.address)
            await eventually(lambda number=number: len(ours.errors) == len(theirs.errors) == number)
        assert all(error.args[0] in str(each) if error.args else "Zero" in str(each) for each in ours.errors)
        assert not dialling.channels + accepting.channels


async def test_failing_handler_ends_its_channel():
    async with channel_pair() as (near, ours, _, theirs):
        theirs.received = lambda *_: 1 / 0
        near.send(b"")
        await ours.when(lambda: ours.errors)
        assert "ZeroDivisionError" in str(ours.errors[0])


# -- interrupts -----------------------------------------------------------------------------------------


def interrupt_sending(loop, near, theirs, monkeypatch):
    """After five bytes."""
    kind = type(socket_of(near))
    send = kind.send

    def interrupted(sock, data):
        if sock is not socket_of(near):
            return send(sock, data)
        send(sock, data[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(kind, "send", interrupted)
    for _ in range(3):
        near.send(bytes(100))


def interrupt_reading(loop, near, theirs, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    theirs.received = interrupted
    for _ in range(3):
        near.send(bytes(100))


def interrupt_adding(loop, near, theirs, monkeypatch):
    add = Outbox.add

    def interrupted(*args):
        add(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Outbox, "add", interrupted)
    loop.call_soon(near.send, b"head", [memoryview(bytes(LONG))])


@each_carrier
@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("interrupt", [interrupt_sending, interrupt_reading, interrupt_adding])
def test_interrupt_in_the_middle_of_a_frame_ends_the_channel(over, make_loop, interrupt, monkeypatch):
    """As in a notebook, which runs the loop again after Ctrl-C."""
    loop = make_loop()
    try:
        pair = channel_pair(over)
        near, ours, _, theirs = loop.run_until_complete(pair.__aenter__())
        interrupt(loop, near, theirs, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(asyncio.sleep(60))
        loop.run_until_complete(asyncio.wait_for(ours.when(lambda: ours.errors), 20))
        loop.run_until_complete(asyncio.wait_for(theirs.when(lambda: theirs.errors), 20))
        ended = theirs if interrupt is interrupt_reading else ours
        assert "this process was interrupted by KeyboardInterrupt" in str(ended.errors[0])
        assert not theirs.messages
        again = loop.run_until_complete(ours.port.connect(theirs.port.address))
        assert again.is_open
        loop.run_until_complete(pair.__aexit__(None, None, None))
    finally:
        loop.close()


async def test_certificate_of_a_stranger_is_refused():
    async with (
        port_of(Recorder(), host="here", **tls_settings()) as accepting,
        port_of(Recorder(), host="there", **tls_settings("stranger")) as stranger,
    ):
        with pytest.raises((PeerLostError, AuthenticationError)):
            await stranger.connect(accepting.address)
