"""Channels for tests: a handler that records what it is told, and pairs of ports in this process."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from asyncdist.config import Config
from asyncdist.errors import PeerLostError
from asyncdist.net import ChannelPort, IncomingMessage, PeerChannel
from asyncdist.net.security.tls import TlsSocket

TOKEN = "the token of the test"
TLS = Path(__file__).parent.parent / "tls"


class Recorder:
    """A handler that keeps what it is told. ``events`` are texts, ``messages`` heads with the bytes of their buffers."""

    def __init__(self) -> None:
        self.port: ChannelPort
        """The port of the channels of a `channel_pair`."""
        self.channels: list[PeerChannel] = []
        self.openings: list[IncomingMessage] = []
        self.events: list[str] = []
        self.messages: list[tuple[bytes, list[bytes]]] = []
        self.descriptors: list[int] = []
        self.errors: list[PeerLostError] = []
        self.memory: dict[bytes, Sequence[memoryview]] = {}
        """Memory for long messages, by head."""
        self.refused: dict[bytes, Exception] = {}
        self._changed = asyncio.Event()

    def connected(self, channel: PeerChannel) -> None:
        self.channels.append(channel)
        self._changed.set()

    def received(
        self, channel: PeerChannel, head: bytes, buffers: Sequence[memoryview], descriptors: Sequence[int]
    ) -> None:
        self.messages.append((head, [bytes(buffer) for buffer in buffers]))
        self.descriptors.extend(descriptors)
        self._changed.set()

    def opened(self, channel: PeerChannel, message: IncomingMessage) -> None:
        self.openings.append(message)
        self.events.append(f"opened {message.head.decode()}")
        message.buffers = self.memory.get(message.head, ())
        if message.head in self.refused:
            message.drop(self.refused[message.head])
        self._changed.set()

    def completed(self, channel: PeerChannel, message: IncomingMessage) -> None:
        self.events.append(f"{message.error or 'completed'} {message.head.decode()}")
        self.messages.append((message.head, [bytes(buffer) for buffer in message.buffers]))
        self._changed.set()

    def withdrawn(self, channel: PeerChannel, message: IncomingMessage) -> None:
        self.events.append(f"withdrawn {message.head.decode()}")
        self._changed.set()

    def closed(self, channel: PeerChannel, error: PeerLostError) -> None:
        self.errors.append(error)
        self._changed.set()

    async def until(self, count: int) -> list[tuple[bytes, list[bytes]]]:
        """Wait until ``count`` messages have arrived, and return them."""
        await self.when(lambda: len(self.messages) >= count)
        return self.messages

    async def when(self, true) -> None:
        """Wait until a condition on what was recorded holds."""
        async with asyncio.timeout(60):
            while not true():
                self._changed.clear()
                await self._changed.wait()


CARRIERS = ("unix", "tcp", "tls")


def place(over: str) -> str:
    """Return the host of a port to which one of the host "here" connects over a carrier."""
    return "here" if over == "unix" else "there"


def settings_of(over: str) -> dict[str, str]:
    """Return the settings of both ports."""
    return tls_settings() if over == "tls" else {}


def tls_settings(who: str = "member") -> dict[str, str]:
    return {
        "tls_cert": str(TLS / f"{who}.crt"),
        "tls_key": str(TLS / f"{who}.key"),
        "tls_ca": str(TLS / "ca.crt"),
    }


def port_of(handler: Recorder, *, host: str | None = None, token: str | None = TOKEN, **settings) -> ChannelPort:
    """Return a port of this process. Ports with different hosts connect over TCP."""
    config = Config(host=host, **settings)
    return ChannelPort(handler, host="127.0.0.1", service="test", token=token, config=config)


@contextlib.asynccontextmanager
async def channel_pair(
    over: str = "unix", **settings
) -> AsyncIterator[tuple[PeerChannel, Recorder, PeerChannel, Recorder]]:
    """Connect two ports of this process over a `CARRIERS`; yield the two ends of the channel with their handlers."""
    ours, theirs = Recorder(), Recorder()
    settings = {**settings_of(over), **settings}
    async with (
        port_of(ours, host="here", **settings) as dialling,
        port_of(theirs, host=place(over), **settings) as accepting,
    ):
        ours.port, theirs.port = dialling, accepting
        channel = await dialling.connect(accepting.address)
        await theirs.when(lambda: theirs.channels)
        yield channel, ours, theirs.channels[0], theirs


def socket_of(channel: PeerChannel) -> socket.socket | TlsSocket:
    """Return the socket of a channel, to damage what it carries."""
    return channel._sock


def stop_reading(channel: PeerChannel) -> None:
    """Let a channel read nothing until `read_again`."""
    asyncio.get_running_loop().remove_reader(socket_of(channel).fileno())


def read_again(channel: PeerChannel) -> None:
    asyncio.get_running_loop().add_reader(socket_of(channel).fileno(), channel.read_now)
