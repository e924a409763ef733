"""A port: where a process accepts channels, and from which it opens them. One port serves one service of one job."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import secrets
import socket
from dataclasses import replace
from typing import Any, Self

from asyncdist.base import lifecycle
from asyncdist.base.backoff import Backoff
from asyncdist.base.deadline import Deadline, Timeout
from asyncdist.base.descriptors import ClosingOnError
from asyncdist.base.error_text import describe_error
from asyncdist.config import Config
from asyncdist.errors import PeerLostError
from asyncdist.net.acceptor import Acceptor
from asyncdist.net.busy_poll import AdaptiveBusyPoll
from asyncdist.net.connection.channel import ChannelHandler, PeerChannel
from asyncdist.net.connection.handshake import ChannelAddress, Greeting, accept, dial, this_place
from asyncdist.net.connection.liveness import ChannelLiveness
from asyncdist.net.connection.staging import can_stage
from asyncdist.net.listening import listen, listen_tcp
from asyncdist.net.loop_socket import AnySocket
from asyncdist.net.process_identity import process_identity
from asyncdist.net.security.handshake import Security
from asyncdist.net.security.tls import rank_contexts

_MOST_HANDSHAKES = 512
_MOST_ATTEMPTS, _FIRST_PAUSE, _LONGEST_PAUSE = 5, 0.05, 0.5
"""Attempts to connect to a port that closes the connection during the handshake, and the seconds between them."""


class ChannelPort:
    """Accepts and opens channels on the running loop, from its creation until `close`.

    The handler is called in the context (`contextvars`) in which the port was made.

    Args:
        handler: Receives the messages of all channels.
        host: The address of this machine at which it listens for other hosts.
        service: The name of the service. Ports of different services do not connect.
        job: The name of the job, to which the proof of the token is bound.
        token: The token of the job.
        config: The settings.
        label: The name of this process in messages, such as ``"rank 3"``; empty for its process id alone.
        about: Plain data for the peers: `Greeting.about`.

    Raises:
        AddressError: This machine has no such address.
    """

    def __init__(
        self,
        handler: ChannelHandler,
        *,
        host: str,
        service: str,
        job: str = "",
        token: str | None,
        config: Config,
        label: str = "",
        about: Any = None,
    ) -> None:
        self.handler = handler
        self._config = config
        contexts = rank_contexts(config) or (None, None)
        self._security = Security(token, f"{service} of job {job!r}", *contexts)
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        """The context in which the handler is called, for channels that either side opens."""
        self._pid = os.getpid()
        place = this_place(config.host)
        process = f"process {self._pid} on {config.host or socket.gethostname()}"
        name = f"{label} ({process})" if label else process
        unix = f"asyncdist-{service}-{secrets.token_hex(16)}" if hasattr(socket, "SO_PEERCRED") else ""
        sockets = [listen_tcp(host, " for channels")]
        if unix:
            with ClosingOnError(sockets[0]):
                sockets.append(listen(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"\0{unix}"))
        self.address = ChannelAddress(secrets.token_hex(8), name, *place, unix, (host, sockets[0].getsockname()[1]))
        identity = process_identity(config.host)
        self._greeting = Greeting(self.address.id, name, config.host, identity, bool(unix) and can_stage(), about)
        self._channels: set[PeerChannel] = set()
        self._by_id: dict[str, list[PeerChannel]] = {}
        """The channels to each peer: each side may have opened one."""
        self._dialling: dict[str, asyncio.Task[PeerChannel]] = {}
        self._busy_poll = AdaptiveBusyPoll.where_it_pays(self._loop, config)
        self._liveness = ChannelLiveness(config.heartbeat, config.host, self._channels)
        self._acceptors = [
            Acceptor(
                sock, self._accept, what=f"{name}: the port for channels", most=_MOST_HANDSHAKES,
                timeout=config.handshake_timeout, loop=self._loop,
            )
            for sock in sockets
        ]  # fmt: skip
        self._is_closed = False
        lifecycle.register_hooks(self)

    def use_token(self, token: str) -> None:
        """Accept and open further channels with another token: the job shares it from now on."""
        self._security = replace(self._security, token=token)

    @property
    def channels(self) -> list[PeerChannel]:
        return list(self._channels)

    def channel_to(self, peer: str) -> PeerChannel | None:
        """Return the open channel to the port with this id, or None."""
        for channel in self._by_id.get(peer, ()):
            if channel.is_open:
                return channel
        return None

    async def connect(
        self, address: ChannelAddress, timeout: Timeout = None, *, token: str | None = None
    ) -> PeerChannel:
        """Return an open channel to a port; open one if necessary.

        Args:
            address: Where the port listens.
            timeout: Seconds; None for ASYNCDIST_TIMEOUT. The handshake has its own limit, ASYNCDIST_HANDSHAKE_TIMEOUT.
            token: The token of that port; None if it is that of this port.

        Raises:
            PeerLostError: The process cannot be reached, or has ended.
            AuthenticationError: One side does not hold the token.
            TimeoutError: The timeout passed.
        """
        channel = self.channel_to(address.id)
        if channel is not None:
            return channel
        if self._is_closed:
            raise PeerLostError(address.name, "this process has closed its port")
        task = self._dialling.get(address.id)
        if task is None:
            dialling = self._dial(address, token)
            task = self._loop.create_task(dialling, name="asyncdist-dial", context=self._context)
            self._dialling[address.id] = task
            task.add_done_callback(functools.partial(self._end_dialling, address.id))
        deadline = Deadline.after(self._config.timeout if timeout is None else timeout)
        await asyncio.wait([task], timeout=deadline.remaining_or_none())
        if not task.done():
            raise TimeoutError(f"{address.name} has not accepted a connection in time")
        if task.cancelled():
            raise PeerLostError(address.name, "this process has closed its port")
        return task.result()

    def _end_dialling(self, port: str, task: asyncio.Task[PeerChannel]) -> None:
        self._dialling.pop(port, None)
        # Nobody may wait any more: asyncio must not log the error as never retrieved.
        if not task.cancelled():
            task.exception()

    async def _dial(self, address: ChannelAddress, token: str | None) -> PeerChannel:
        security = self._security if token is None else replace(self._security, token=token)
        try:
            async with asyncio.timeout(self._config.handshake_timeout):
                sock, peer = await self._dial_patiently(address, security)
        except TimeoutError as cause:
            limit = f"{self._config.handshake_timeout:g} s (ASYNCDIST_HANDSHAKE_TIMEOUT)"
            raise PeerLostError(address.name, f"it did not answer within {limit}") from cause
        except (OSError, EOFError) as cause:
            raise PeerLostError(address.name, f"it cannot be reached: {describe_error(cause)}") from cause
        channel = self._begin(sock, peer)
        if channel.error is not None:
            raise channel.error
        return channel

    async def _dial_patiently(self, address: ChannelAddress, security: Security) -> tuple[AnySocket, Greeting]:
        """Connect to a port. Try a few times: a port with too many handshakes at once closes the oldest one."""
        async for attempt in Backoff(_FIRST_PAUSE, _LONGEST_PAUSE):
            try:
                return await dial(address, self.address, self._greeting, security)
            except (EOFError, ConnectionResetError, BrokenPipeError):
                if attempt + 1 == _MOST_ATTEMPTS:
                    raise
        raise AssertionError

    def _begin(self, sock: AnySocket, peer: Greeting) -> PeerChannel:
        channel = PeerChannel(sock, peer, self, most_nbytes=self._config.max_message_nbytes)
        self._channels.add(channel)
        self._by_id.setdefault(peer.id, []).append(channel)
        self._liveness.start()
        channel.begin()
        return channel

    def heard(self, channel: PeerChannel) -> None:
        if self._busy_poll is not None:
            self._busy_poll.heard(channel)

    def forget(self, channel: PeerChannel) -> None:
        if channel in self._channels:
            self._channels.discard(channel)
            siblings = self._by_id[channel.peer.id]
            siblings.remove(channel)
            if not siblings:
                del self._by_id[channel.peer.id]
        if not self._channels:
            self._liveness.stop()

    async def _accept(self, sock: socket.socket) -> None:
        self._begin(*await accept(sock, self._greeting, self._security))

    # -- the end -----------------------------------------------------------------------------------

    async def close(self, reason: str = "its port is closed") -> None:
        """Stop listening, and close all channels in order. Idempotent.

        If the caller is cancelled, the channels are closed at once.
        """
        if self._is_closed:
            return
        self._is_closed = True
        lifecycle.unregister_hooks(self)
        tasks: list[asyncio.Task[Any]] = list(self._dialling.values())
        for task in tasks:
            task.cancel()
        for acceptor in self._acceptors:
            tasks += acceptor.stop()
        try:
            if tasks:
                await asyncio.wait(tasks)
            await asyncio.gather(*[channel.close(reason) for channel in self.channels])
        finally:
            for channel in self.channels:
                channel.leave(reason)
            self._liveness.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def end_with_process(self) -> None:
        for channel in self.channels:
            channel.end_with_process()

    def after_fork_in_child(self) -> None:
        """Send nothing in a forked child, whose copies of the sockets are closed."""
        self._is_closed = True
        self._channels.clear()
        self._by_id.clear()
