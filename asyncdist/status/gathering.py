"""Asks the other ranks of a world for their status, for one viewer that is connected to this rank.

Up to 64 ranks are asked one by one. More are divided into blocks, of which one rank each is asked for the answers of all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
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
_DEGREE = 64
_PART_OF_LIMIT = 0.4
"""The part of its time that a rank gives to one that asks a block. That one takes it again to look at silent ranks."""

Address = tuple[str, int]


class Gathered(NamedTuple):
    """The answers of the other ranks, by rank, and why the rest is silent, with the ids of their processes."""

    answers: dict[int, dict[str, Any]]
    silent: dict[int, tuple[str, int | None]]


class StatusGathering:
    """The questions of one rank to the others, at the address of each, by rank. It keeps its connections until `close`."""

    def __init__(self, endpoint: Endpoint, addresses: Sequence[Address | None], security: Security) -> None:
        self._endpoint, self._addresses, self._security = endpoint, addresses, security
        self._connections: dict[int, LoopSocket] = {}
        self._asking: dict[int, asyncio.Task[Gathered]] = {}

    async def gather(self, question: Mapping[str, Any], ranks: range, limit: float) -> Gathered:
        """Ask other ranks, and return the answers that arrive within ``limit`` seconds.

        A rank that has not answered an earlier question is not waited for again.
        """
        deadline = asyncio.get_running_loop().time() + limit
        for rank, task in list(self._asking.items()):
            if task.done():
                del self._asking[rank]
                if not task.cancelled():
                    task.exception()
        answers: dict[int, dict[str, Any]] = {}
        silent: dict[int, str] = {}
        pids: dict[int, int | None] = {}
        blocks = list(_blocks(ranks, self._endpoint.rank))
        asked: dict[int, range] = {}
        while blocks or asked:
            for block in blocks:
                rank = next((each for each in block if each not in self._asking and each not in silent), -1)
                if rank < 0:
                    silent.update({each: "it does not answer" for each in block if each not in silent})
                else:
                    asked[rank] = block
                    self._asking[rank] = asyncio.create_task(self._answer_for(block, rank, question, limit))
            blocks = []
            left = deadline - asyncio.get_running_loop().time()
            if not asked or left <= 0:
                break
            await asyncio.wait(
                [self._asking[rank] for rank in asked], timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            for rank, block in list(asked.items()):
                if (task := self._asking[rank]).done():
                    del self._asking[rank], asked[rank]
                    if (error := task.exception()) is None:
                        found = task.result()
                        answers.update(found.answers)
                        silent.update({each: why for each, (why, _) in found.silent.items()})
                        pids.update({each: pid for each, (_, pid) in found.silent.items()})
                    else:
                        silent[rank] = _in_words(error)
                        blocks += [block] * (len(block) > 1)
        for rank, block in asked.items():
            silent.update(dict.fromkeys(block, f"rank {rank}, which asks it, does not answer"))
            silent[rank] = "it does not answer"
        await self._explain(silent, answers, min(_LOOK, limit))
        pid_of = self._endpoint.processes.pid_of
        return Gathered(answers, {rank: (why, pids.get(rank) or pid_of(rank)) for rank, why in silent.items()})

    async def _answer_for(self, block: range, rank: int, question: Mapping[str, Any], limit: float) -> Gathered:
        """Return the answers of a block of ranks, for which one of them is asked."""
        if len(block) == 1:
            return Gathered({rank: await self._answer_of(rank, question, _PATIENCE)}, {})
        asked = {**question, "gather": [block.start, block.stop], "limit": _PART_OF_LIMIT * limit}
        answer = await self._answer_of(rank, asked, _PATIENCE)
        silent = {int(each): (str(why), pid) for each, why, pid in answer["silent"]}
        return Gathered({int(each["rank"]): each for each in answer["ranks"]}, silent)

    def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    async def _answer_of(self, rank: int, question: Mapping[str, Any], limit: float) -> dict[str, Any]:
        address = self._addresses[rank]
        if address is None:
            known = self._endpoint.hosts[rank] is not None
            raise ConnectionRefusedError(
                "it runs with ASYNCDIST_STATUS=0" if known else "its address is not known here"
            )
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

    async def _explain(self, silent: dict[int, str], answers: Mapping[int, object], limit: float) -> None:
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
                answer = await self._answer_of(neighbour, {"look_at": ranks}, limit)
                silent.update({int(rank): str(seen) for rank, seen in answer["seen"] if seen and rank in silent})

    def _share_a_host(self, rank: int, other: int) -> bool:
        hosts = self._endpoint.hosts
        return bool(hosts[rank] == hosts[other])


def _blocks(ranks: range, own: int) -> Iterator[range]:
    """Yield blocks that contain all ranks but the own one: at most 63 of each size."""
    size = 1
    while size * _DEGREE < len(ranks):
        size *= _DEGREE
    for first in ranks[::size]:
        block = range(first, min(first + size, ranks.stop))
        if own not in block:
            yield block
        elif size > 1:
            yield from _blocks(block, own)


def _in_words(error: BaseException) -> str:
    if isinstance(error, ConnectionRefusedError) and error.errno is not None:
        return "its status port is closed: its process has ended, or it has left the world"
    if isinstance(error, EOFError):
        return "it has closed its status port"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return describe_error(error)
