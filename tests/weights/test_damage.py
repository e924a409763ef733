"""Sources that send wrong bytes, refuse or send nonsense, and strangers: errors name the cause, others are served."""

import asyncio
import logging

import msgpack
import pytest
import torch

from asyncdist.base.background_loop import run_in_background
from asyncdist.config import Config
from asyncdist.errors import AuthenticationError, PeerLostError
from asyncdist.net import ChannelAddress, ChannelPort
from asyncdist.weights import Publisher, Subscriber
from asyncdist.weights.content.layout import Manifest
from asyncdist.weights.content.selection import whole_selection
from asyncdist.weights.errors import DigestError
from asyncdist.weights.transfer.exchange import WeightsExchange
from asyncdist.weights.transfer.transfer_messages import ASK, BLOCKS, MAPPED, REFUSED
from tests.weights.conftest import TOKEN

LIMIT = 60.0
STATE = {"first": torch.arange(500_000.0), "second": torch.arange(700_000.0), "small": torch.ones(5)}


class Relay:
    """A reader on a host of its own that has the newest version, and that a test damages."""

    def __init__(self, job):
        self.job = job

    async def __aenter__(self):
        await run_in_background(self._open())
        return self

    async def _open(self):
        config = Config.from_environment().with_(host="host of the relay")
        self.exchange = await WeightsExchange.open(self.job, "weights", label="relay", config=config, timeout=LIMIT)
        version = await self.exchange.table.latest()
        manifest = Manifest.decode(await self.exchange.table.manifest(version))
        self.held = await self.exchange.fetch(version, manifest, whole_selection(manifest.layout))
        self.name = self.exchange.port.address.name

    def damage(self, name):
        self.held.tensor(name).view(torch.uint8)[-1] ^= 1

    async def __aexit__(self, *error):
        await run_in_background(self.exchange.close())


def reader(job, on_host, **options):
    like = {name: torch.empty_like(tensor, device="meta") for name, tensor in STATE.items()}
    return on_host("host of the reader", Subscriber, like=like, job=job, **options)


async def test_reader_drops_damaged_bytes_and_tries_another_source(job, on_host, caplog):
    async with Publisher(STATE, job=job) as publisher:
        await publisher.publish()
        async with Relay(job) as relay, reader(job, on_host) as subscriber:
            relay.damage("second")
            with caplog.at_level(logging.WARNING):
                version = await subscriber.next(LIMIT)
            async with subscriber.swap(version) as read:
                assert all(torch.equal(read[name], tensor) for name, tensor in STATE.items())
            assert f"second of version 1 as sent by {relay.name} does not have the digest" in caplog.text


async def test_damaged_bytes_of_the_only_source_are_an_error_until_the_next_version(job, on_host):
    async with Publisher(STATE, job=job) as publisher:
        await publisher.publish()
        relay = Relay(job)
        await relay.__aenter__()
    relay.damage("small")
    async with reader(job, on_host) as subscriber:
        with pytest.raises(DigestError, match="small of version 1 as sent by relay") as caught:
            await subscriber.next(LIMIT)
        assert (caught.value.parameter, caught.value.source) == ("small", relay.name)
        with pytest.raises(TimeoutError):
            await subscriber.next(0.05)
        async with Publisher(STATE, job=job) as publisher:
            await publisher.publish()
            assert (await subscriber.next(LIMIT)).incarnation == 2
    await relay.__aexit__()


async def test_damaged_slice_is_noticed(job, on_host, monkeypatch):
    async with Publisher(STATE, job=job) as publisher:
        await publisher.publish()
        monkeypatch.setattr("asyncdist.weights.transfer.serving.digest", lambda data: 5)
        like = {"second": torch.empty(1000)}
        async with on_host("b", Subscriber, like=like, slices={"second": slice(3, 1003)}, job=job) as subscriber:
            with pytest.raises(DigestError, match="second of version 1 as sent by publisher"):
                await subscriber.next(LIMIT)


QUESTION = msgpack.packb([ASK, 7, "a version that is not there", "", 0, False, []])


class Nonsense:
    """A process of the job that sends what the test says to the publisher."""

    def __init__(self, job, token):
        self.job, self.token = job, token
        self.heard = []

    async def send(self, head, buffers):
        """Send a message and a question to the newest holder, and wait for the answer or the end of the channel."""
        config = Config.from_environment()
        exchange = await WeightsExchange.open(self.job, "weights", label="other", config=config, timeout=LIMIT)
        async with exchange.table.holders(await exchange.table.latest()) as holders:
            (holder,) = holders.values()
        port = ChannelPort(
            self, host="127.0.0.1", service="weights weights", job="job", token=self.token, config=config, label="other"
        )
        self.changed = asyncio.Event()
        try:
            channel = await port.connect(ChannelAddress.decode(holder.address), LIMIT)
            channel.send(head, buffers)
            channel.send(QUESTION)
            await self.changed.wait()
        finally:
            await port.close()
            await exchange.close()

    def connected(self, channel):
        pass

    def received(self, channel, head, buffers, descriptors):
        self.heard.append(msgpack.unpackb(head))
        self.changed.set()

    def closed(self, channel, error):
        self.heard.append(error)
        self.changed.set()


@pytest.mark.parametrize(
    ("head", "buffers", "ends"),
    [
        (b"", [], True),
        (b"\xff\xff", [], True),
        (msgpack.packb([ASK, 1]), [], True),
        (msgpack.packb([ASK, "x", 1, 2, 3, 4, 5]), [], True),
        (msgpack.packb([ASK, 1, "key", "", -1, False, []]), [], True),
        (msgpack.packb([MAPPED, 1]), [], True),
        (msgpack.packb([77, 1]), [memoryview(bytes(100_000))], True),
        (msgpack.packb([77, 1]), [], False),
        # Blocks that no request waits for.
        (msgpack.packb([BLOCKS, 1, 0, b"x"]), [memoryview(bytes(100_000))], False),
        (msgpack.packb([BLOCKS, 1, 0, b"x"]), [memoryview(bytes(10))], False),
    ],
)
async def test_nonsense_ends_its_channel_at_most_and_others_are_served(job, head, buffers, ends):
    async with Publisher(STATE, job=job) as publisher, Subscriber(like=STATE, job=job) as subscriber:
        await publisher.publish()
        other = Nonsense(job, TOKEN)
        await run_in_background(other.send(head, buffers))
        if ends:
            assert isinstance(other.heard[0], PeerLostError)
        else:
            assert other.heard[0][:2] == [REFUSED, 7]
        await subscriber.next(LIMIT)


async def test_stranger_without_the_token_gets_nothing(job, monkeypatch, on_host):
    async with Publisher(STATE, job=job) as publisher:
        await publisher.publish()
        stranger = Nonsense(job, "another token")
        with pytest.raises(AuthenticationError):
            await run_in_background(stranger.send(b"", []))
        assert stranger.heard == []
        monkeypatch.setenv("ASYNCDIST_TOKEN", "another token")
        with pytest.raises(AuthenticationError):
            await Subscriber(like=STATE, job=job).__aenter__()
        monkeypatch.delenv("ASYNCDIST_TOKEN")
        with pytest.raises(AuthenticationError):
            await Subscriber(like=STATE, job=job).__aenter__()
