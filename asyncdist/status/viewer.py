"""Asks a job for the status of its ranks: finds one rank that answers, and another one when that ends.

async with JobViewer("asyncdist://10.0.0.1:29500/digits", Config.from_environment()) as viewer:
    answer = await viewer.ask()
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from typing import Any, Self

from asyncdist.config import Config
from asyncdist.errors import AsyncdistError, AuthenticationError, RendezvousError
from asyncdist.net import LoopSocket, dial_tcp, rank_contexts
from asyncdist.status.discovery import PublishedWorld, described, meeting_point, status_security, wait_for_worlds

_STAGGER = 0.2
"""Seconds after which the next rank is tried while one has not answered."""
_CONNECT = 3.0
"""Seconds within which a rank must accept a connection."""
_MARGIN = 2.0
"""Seconds beyond the limit of a question within which its answer must arrive."""


class JobViewer:
    """A viewer of the ``job`` at an init method, or ``host:port``.

    It has ``timeout`` seconds to find the job, and a rank of it that answers. It shows the world whose id begins with
    ``world``; by default the one with the most ranks.
    """

    def __init__(self, job: str, config: Config, *, timeout: float = 10.0, world: str = "") -> None:
        self.method = meeting_point(job)
        self._config, self._timeout, self._world = config, timeout, world
        self._tls = rank_contexts(config)
        self._known: PublishedWorld | None = None
        self._connection: LoopSocket | None = None
        self.others: list[str] = []
        """The ids of the job's other worlds."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def ask(
        self, *, calls: int = 64, window: float = 10.0, stacks: Collection[int] = (), limit: float = 2.0
    ) -> dict[str, Any]:
        """Return the answers of all ranks.

        Args:
            calls: The newest calls of each rank to return, in addition to the pending ones.
            window: The seconds over which the ranks compute their rates.
            stacks: The ranks whose Python stacks to return.
            limit: Seconds to wait for a rank that does not answer.

        Returns:
            ``ranks``, the content of each answering rank's recorder; ``silent``, the other ranks, why, and their process
            ids; ``addresses``, the status ports by rank; ``world``, ``world_size`` and ``answered_by``.

        Raises:
            RendezvousError: The job has no rank that answers.
            StoreConnectionError: Its store cannot be reached.
            AuthenticationError: The token is not that of the job.
        """
        question = {"gather": True, "calls": calls, "window": window, "stacks": list(stacks), "limit": limit}
        if self._connection is not None:
            answer = await self._answer(self._connection, question)
            if answer is not None:
                return answer
            self.close()
        # The ranks of the world that was shown last; then whatever world the store names now.
        if self._known is not None:
            # A rank of another world may have got the port of one that has ended.
            with contextlib.suppress(AuthenticationError):
                answer = await self._ask_world(self._known, question)
                if answer is not None:
                    return answer
        return await self._ask_job(question)

    async def _ask_job(self, question: Mapping[str, Any]) -> dict[str, Any]:
        found = await wait_for_worlds(self.method, self._config, self._timeout)
        worlds = [world for world in found if world.world_id.startswith(self._world)]
        refused: AuthenticationError | None = None
        for world in worlds:
            try:
                answer = await self._ask_world(world, question)
            except AuthenticationError as error:
                refused = error
                continue
            if answer is not None:
                self.others = [other.world_id for other in found if other is not world]
                return answer
        if self._world and not worlds:
            known = ", ".join(world.world_id[:8] for world in found)
            raise RendezvousError(f"the job has no world {self._world!r}; it has {known}")
        if refused is not None:
            raise refused
        raise RendezvousError(
            f"no rank of the job at {described(self.method)} answers: its ranks have ended, or this machine does not reach "
            f"their ports, such as {_example(found)}; run asyncdist top on a machine that does"
        )

    async def _ask_world(self, world: PublishedWorld, question: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the answer of the first rank that gives one; None if none does."""
        tried: dict[int, tuple[str, int]] = dict(world.ports)
        while tried:
            found = await self._first_to_answer(tried, world)
            if found is None:
                return None
            rank, connection = found
            answer = await self._answer(connection, question)
            if answer is not None:
                self._connection, self._known = connection, world
                ports = {rank: each for rank, each in enumerate(answer["addresses"]) if each is not None}
                world.ports = {rank: (str(host), int(port)) for rank, (host, port) in ports.items()}
                return answer
            connection.close()
            del tried[rank]
        return None

    async def _first_to_answer(
        self, ports: Mapping[int, tuple[str, int]], world: PublishedWorld
    ) -> tuple[int, LoopSocket] | None:
        """Connect to one rank after the other, without waiting for those that are stopped."""
        waiting = sorted(ports.items(), reverse=True)
        trying: dict[asyncio.Task[LoopSocket], int] = {}
        refused: AuthenticationError | None = None
        try:
            while waiting or trying:
                if waiting:
                    rank, port = waiting.pop()
                    trying[asyncio.create_task(self._connect(*port, world))] = rank
                done, _ = await asyncio.wait(
                    trying, timeout=_STAGGER if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    rank, error = trying.pop(task), task.exception()
                    if error is None:
                        return rank, task.result()
                    if isinstance(error, AuthenticationError):
                        refused = error
            if refused is not None:
                raise refused
            return None
        finally:
            await _discard(trying)

    async def _connect(self, host: str, port: int, world: PublishedWorld) -> LoopSocket:
        async with asyncio.timeout(_CONNECT):
            return await dial_tcp(host, port, status_security(world.world_id, world.token, self._tls))

    async def _answer(self, connection: LoopSocket, question: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a question; None if the rank gives none."""
        try:
            async with asyncio.timeout(question["limit"] + 1.0 + _MARGIN):
                answer: dict[str, Any] = await connection.ask(question)
        except (OSError, EOFError, TimeoutError, AsyncdistError):
            return None
        if "error" in answer:
            raise RendezvousError(f"a rank cannot answer: {answer['error']}; use the job's version of asyncdist")
        return answer


async def _discard(trying: Collection[asyncio.Task[LoopSocket]]) -> None:
    for task in trying:
        task.cancel()
    for task in trying:
        with contextlib.suppress(asyncio.CancelledError, OSError, EOFError, TimeoutError, AsyncdistError):
            (await task).close()


def _example(worlds: Collection[PublishedWorld]) -> str:
    host, port = next((each for world in worlds for each in world.ports.values()), ("none", 0))
    return f"{host}:{port}"
