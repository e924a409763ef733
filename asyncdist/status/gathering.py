"""Asks the other ranks of a world for their status, for one viewer that is connected to this rank."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from asyncdist.base.descriptors import ClosingOnError
from asyncdist.base.error_text import describe_error
from asyncdist.errors import AsyncdistError
from asyncdist.kernel import Endpoint
from asyncdist.net import LoopSocket, Security, dial_tcp

_PATIENCE = 30.0
"""Seconds after which a rank that has not answered is asked on a new connection."""
_LOOK = 1.0
"""Seconds for another rank to look at the process of a silent one."""

Address = tuple[str, int]


class Gathered(NamedTuple):
    """The answers of the other ranks, by rank, and why the rest is silent."""

    answers: dict[int, dict[str, Any]]
    silent: dict[int, str]


class StatusGathering:
    """The questions of one rank to the others, at the address of each, by rank. It keeps its connections until `close`."""

    def __init__(self, endpoint: Endpoint, addresses: Sequence[Address | None], security: Security) -> None:
        self._endpoint, self._addresses, self._security = endpoint, addresses, security
        self._connections: dict[int, LoopSocket] = {}
        self._asking: dict[int, asyncio.Task[dict[str, Any]]] = {}

    async def gather(self, question: Mapping[str, Any], limit: float) -> Gathered:
        """Ask all other ranks, and return the answers that arrive within ``limit`` seconds.

        A rank that has not answered an earlier question is not waited for again.
        """
        fresh = set()
        for rank in range(self._endpoint.world_size):
            earlier = self._asking.get(rank)
            if rank == self._endpoint.rank or (earlier is not None and not earlier.done()):
                continue
            if earlier is not None and not earlier.cancelled():
                earlier.exception()
            asking = self._asking[rank] = asyncio.create_task(self._answer_of(rank, question, _PATIENCE))
            fresh.add(asking)
        if fresh:
            await asyncio.wait(fresh, timeout=limit)
        answers, silent = {}, {}
        for rank, task in list(self._asking.items()):
            if not task.done():
                silent[rank] = "it does not answer"
                continue
            del self._asking[rank]
            error = task.exception()
            if error is None:
                answers[rank] = task.result()
            else:
                silent[rank] = _in_words(error)
        await self._explain(silent, answers)
        return Gathered(answers, silent)

    def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    async def _answer_of(self, rank: int, question: Mapping[str, Any], limit: float) -> dict[str, Any]:
        address = self._addresses[rank]
        if address is None:
            raise ConnectionRefusedError("it runs with ASYNCDIST_STATUS=0")
        kept = self._connections.pop(rank, None)
        async with asyncio.timeout(limit):
            if kept is not None:
                # The rank may have closed it to make room for another viewer.
                with contextlib.suppress(EOFError, ConnectionError):
                    return await self._ask_over(kept, rank, question)
            connection = await dial_tcp(*address, self._security)
            return await self._ask_over(connection, rank, question)

    async def _ask_over(self, connection: LoopSocket, rank: int, question: Mapping[str, Any]) -> dict[str, Any]:
        with ClosingOnError(connection):
            answer: dict[str, Any] = await connection.ask(question)
        self._connections[rank] = connection
        return answer

    # -- silent ranks ------------------------------------------------------------------------------

    async def _explain(self, silent: dict[int, str], answers: Mapping[int, object]) -> None:
        """Say what the processes of silent ranks do, as this rank sees them or another one on their host."""
        unseen: dict[int, list[int]] = {}
        for rank in silent:
            seen = self._endpoint.processes.look_at(rank)
            if seen:
                silent[rank] = seen
                continue
            neighbour = next((other for other in answers if self._share_a_host(rank, other)), None)
            if neighbour is not None:
                unseen.setdefault(neighbour, []).append(rank)
        for neighbour, ranks in unseen.items():
            with contextlib.suppress(OSError, EOFError, TimeoutError, AsyncdistError):
                answer = await self._answer_of(neighbour, {"look_at": ranks}, _LOOK)
                silent.update({int(rank): str(seen) for rank, seen in answer["seen"] if seen and rank in silent})

    def _share_a_host(self, rank: int, other: int) -> bool:
        hosts = self._endpoint.hosts
        return bool(hosts[rank] == hosts[other])


def _in_words(error: BaseException) -> str:
    if isinstance(error, ConnectionRefusedError) and error.errno is not None:
        return "its status port is closed: its process has ended, or it has left the world"
    if isinstance(error, EOFError):
        return "it has closed its status port"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return describe_error(error)
