"""The status port of a rank: it answers ``asyncdist top`` for this rank, and for all ranks of its world.

It runs in a thread of its own, one for all worlds of the process, so it answers while the program's threads compute or
wait in a collective, while a callback blocks the background loop, and after a group has failed. The first viewer starts
that thread and its loop; until then the thread of periodic calls watches the port. Nothing is sent while no viewer asks.

A question is a map: ``calls`` and ``window`` as in `Recorder.content`; ``stacks``, the ranks whose Python stacks are
wanted; ``gather``, whether to ask the other ranks too, within ``limit`` seconds, or the first of them and the end; or only
``look_at``, ranks whose processes the asker cannot see. A rank answers with its recorder, and for the world with the
answers of all ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from asyncdist.base.background_loop import observing_loop
from asyncdist.base.daemon_threads import periodic_calls
from asyncdist.base.error_text import describe_error
from asyncdist.config import Config
from asyncdist.errors import AsyncdistError, ProtocolError, StoreError
from asyncdist.kernel import Endpoint
from asyncdist.kernel.tracing.recorder import Details
from asyncdist.net import ACCEPT_AGAIN, Acceptor, EvictingQueue, LoopSocket, accept, listen_tcp, rank_contexts
from asyncdist.status.discovery import status_security
from asyncdist.status.gathering import Address, StatusGathering

log = logging.getLogger("asyncdist")

_MOST_HANDSHAKES = _MOST_VIEWERS = 64
_MOST_CALLS, _LONGEST_LIMIT = 2000, 60.0
_MOST_QUESTION_NBYTES = 1 << 16


class StatusPort:
    """Listens from its creation, and answers once `serve` was called. `close` it with the world.

    ``config`` are the settings of the world, with its token.
    """

    def __init__(self, host: str, config: Config) -> None:
        self._config = config
        self._tls = rank_contexts(config)
        self._sock = listen_tcp(host, " for asyncdist top", ", or do without (ASYNCDIST_STATUS=0)")
        self.address: Address = host, self._sock.getsockname()[1]
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of all status ports; None until something connects to this one."""
        self._acceptor: Acceptor | None = None
        self._viewers: EvictingQueue[LoopSocket] = EvictingQueue(_MOST_VIEWERS, LoopSocket.close)
        """The authenticated connections, those that have asked nothing for the longest time first."""
        self._closed = False
        self._endpoint: Endpoint | None = None
        self._addresses: Sequence[Address | None] = ()
        self._describe: Details = dict

    def serve(
        self,
        endpoint: Endpoint,
        addresses: Sequence[Address | None],
        describe: Details,
        load: Callable[[range], Awaitable[None]],
    ) -> None:
        """Begin to answer, with further values for this rank that ``describe`` returns, on the port's own thread.

        ``load`` completes the addresses of ranks, which a rank of a large world does not know, or raises StoreError.

        Raises RendezvousError without a free descriptor, and RuntimeError if the process can start no thread.
        """
        self._endpoint, self._addresses, self._describe, self._load = endpoint, addresses, describe, load
        periodic_calls.call_when_readable(self._sock.fileno(), self._attend)

    def close(self) -> None:
        """Stop answering, and close the connections. Idempotent; any thread may call it."""
        if self._closed:
            return
        self._closed = True
        periodic_calls.forget(self._sock.fileno())
        periodic_calls.stop(self._attend)
        loop = self._loop
        if loop is None or asyncio._get_running_loop() is loop:
            self._stop()
            return
        try:
            loop.call_soon_threadsafe(self._stop)
        # The loop has ended with the process.
        except RuntimeError:
            self._sock.close()

    def _attend(self) -> None:
        """Start the loop, because something connects; try again later if the process cannot."""
        if self._closed:
            periodic_calls.stop(self._attend)
            return
        try:
            self._loop = observing_loop().loop
            self._loop.call_soon_threadsafe(self._start)
        except (AsyncdistError, RuntimeError) as error:
            log.error("the status port cannot answer, and tries again: %s", describe_error(error))
            periodic_calls.start(self._attend, ACCEPT_AGAIN, after=ACCEPT_AGAIN)
            return
        periodic_calls.stop(self._attend)

    def _start(self) -> None:
        if not self._closed:
            assert self._endpoint is not None
            assert self._loop is not None
            self._security = status_security(self._endpoint.world_id, self._config.token, self._tls)
            self._acceptor = Acceptor(
                self._sock, self._accept, what=f"rank {self._endpoint.rank}: the status port",
                most=_MOST_HANDSHAKES, timeout=self._config.handshake_timeout, loop=self._loop,
            )  # fmt: skip

    def _stop(self) -> None:
        if self._acceptor is None:
            self._sock.close()
        else:
            self._acceptor.stop()

    # -- connections -------------------------------------------------------------------------------

    async def _accept(self, sock: socket.socket) -> Coroutine[Any, Any, None]:
        return self._serve(await accept(sock, self._security))

    async def _serve(self, connection: LoopSocket) -> None:
        assert self._endpoint is not None
        gathering = StatusGathering(self._endpoint, self._addresses, self._security)
        with contextlib.closing(connection), contextlib.closing(gathering):
            try:
                await self._converse(connection, gathering)
            # The other side hangs up when it needs no further answer.
            except (OSError, EOFError):
                pass
            except ProtocolError as error:
                log.warning("rank %d: the status port ended a connection: %s", self._endpoint.rank, error.summary)
            finally:
                self._viewers.discard(connection)

    async def _converse(self, connection: LoopSocket, gathering: StatusGathering) -> None:
        while True:
            self._viewers.add(connection)
            question = await connection.receive_message(_MOST_QUESTION_NBYTES)
            try:
                answer = await self._answer(question, gathering)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                answer = {"error": f"the question is not legible: {describe_error(error)}"}
            await connection.send_message(answer)

    # -- answers -----------------------------------------------------------------------------------

    async def _answer(self, question: Mapping[str, Any], gathering: StatusGathering) -> dict[str, Any]:
        endpoint = self._endpoint
        assert endpoint is not None
        if "look_at" in question:
            ranks = [rank for rank in question["look_at"] if 0 <= rank < endpoint.world_size]
            return {"seen": [(rank, endpoint.processes.look_at(rank)) for rank in ranks]}
        asked = {**question, "gather": False}
        if not question["gather"]:
            return self._status(asked)
        block = [0, endpoint.world_size] if question["gather"] is True else question["gather"]
        wanted = range(max(0, int(block[0])), min(int(block[1]), endpoint.world_size))
        with contextlib.suppress(StoreError):
            await self._load(wanted)
        found = await gathering.gather(asked, wanted, min(float(question["limit"]), _LONGEST_LIMIT))
        answers = found.answers | ({endpoint.rank: self._status(asked)} if endpoint.rank in wanted else {})
        return {
            "world": endpoint.world_id,
            "world_size": endpoint.world_size,
            "answered_by": endpoint.rank,
            "addresses": list(self._addresses) if len(wanted) == endpoint.world_size else [],
            "ranks": [answers[rank] for rank in sorted(answers)],
            "silent": [(rank, *why) for rank, why in sorted(found.silent.items())],
        }

    def _status(self, question: Mapping[str, Any]) -> dict[str, Any]:
        endpoint = self._endpoint
        assert endpoint is not None
        content = endpoint.recorder.content(
            "asyncdist top",
            min(int(question["calls"]), _MOST_CALLS),
            window=max(0.1, float(question["window"])),
            with_stacks=endpoint.rank in question["stacks"],
        )
        return {**content, **self._describe()}
