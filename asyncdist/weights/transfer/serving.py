"""The sending half of an exchange: gives versions that this process has to readers, by mapping or block by block."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.errors import AsyncdistError, PeerLostError, ProtocolError, UnsupportedError
from asyncdist.net import PeerChannel
from asyncdist.weights.content.difference import difference
from asyncdist.weights.content.digest import digest
from asyncdist.weights.content.selection import Selection
from asyncdist.weights.transfer.held_version import HeldVersion
from asyncdist.weights.transfer.transfer_messages import ALIVE, BLOCKS, MAPPED, REFUSED, Question, encode, group_end

STALL = 2.0
"""Seconds without a sign of a source after which its reader goes on with another one."""
_SIGN = STALL / 4
"""Seconds after which a source without blocks says that it is alive."""
_MOST_REQUESTS = 64
"""The most open requests of one channel. A reader has a few."""
_SHARE_NBYTES = 8 << 20
"""Bytes that the thread compares at a time: a call in a thread takes as long as the comparison of some hundred KiB."""
_SHARES_AHEAD = 2
"""Shares that are compared while the one before travels."""


class _Request:
    """An open request of a reader. ``is_mapped`` once the reader has been given the memory."""

    def __init__(self, held: HeldVersion) -> None:
        self.held = held
        self.is_mapped = False
        self.task: asyncio.Task[None]


class VersionServer:
    """Answers the questions of readers about ``versions``, which this process has, by entry."""

    def __init__(self, versions: Mapping[str, HeldVersion]) -> None:
        self._versions = versions
        # Two threads that compare take turns with the interpreter, and together longer than one.
        self._comparing = DaemonThreadPool("asyncdist-weights-compare", 1, idle_timeout=5.0)
        self._requests: dict[tuple[PeerChannel, int], _Request] = {}

    def ask(self, channel: PeerChannel, question: Question) -> None:
        key = channel, question.number
        if key in self._requests or sum(each is channel for each, _ in self._requests) >= _MOST_REQUESTS:
            raise ProtocolError(f"request {question.number} of {channel.peer.name} is open, or one of too many")
        held = self._versions.get(question.entry)
        if held is None or held.is_abandoned:
            channel.send(encode(REFUSED, question.number, "it does not have this version any more"))
            return
        held.use()
        request = self._requests[key] = _Request(held)
        request.task = asyncio.get_running_loop().create_task(self._answer(channel, question, request))
        # A task that is cancelled before it begins executes no line.
        request.task.add_done_callback(lambda _: self._answered(key, request))

    def _answered(self, key: tuple[PeerChannel, int], request: _Request) -> None:
        if not request.is_mapped:
            self._requests.pop(key, None)
            request.held.release()

    def end(self, channel: PeerChannel, number: int) -> None:
        """End a request, because its reader needs no more."""
        request = self._requests.pop((channel, number), None)
        if request is not None:
            self._end(request)

    def closed(self, channel: PeerChannel) -> None:
        """End the requests of a channel that has ended. Their reader may still read what it has mapped."""
        for key in [key for key in self._requests if key[0] is channel]:
            request = self._requests.pop(key)
            request.held.is_lost |= request.is_mapped
            self._end(request)

    @staticmethod
    def _end(request: _Request) -> None:
        if request.is_mapped:
            request.held.release()
        else:
            request.task.cancel()

    async def close(self) -> None:
        tasks = [request.task for request in self._requests.values()]
        for channel in {channel for channel, _ in self._requests}:
            self.closed(channel)
        self._comparing.shutdown(wait=False)
        if tasks:
            await asyncio.wait(tasks)

    async def _answer(self, channel: PeerChannel, question: Question, request: _Request) -> None:
        try:
            if question.maps:
                await self._share(channel, question, request)
            else:
                base = self._base(question, request.held)
                try:
                    await self._stream(channel, question, request.held, base)
                finally:
                    if base is not None:
                        base.release()
        except PeerLostError:
            pass  # `closed` ends the request
        except AsyncdistError as error:
            if channel.error is None:
                channel.send(encode(REFUSED, question.number, error.summary))

    async def _share(self, channel: PeerChannel, question: Question, request: _Request) -> None:
        held = request.held
        while not held.is_complete:
            await self._wait(channel, question, held)
        memory = held.memory
        if memory is None or memory.fileno() < 0 or not channel.is_local:
            raise UnsupportedError("its memory cannot be mapped")
        descriptors = [] if memory.id in question.known else [memory.fileno()]
        head = encode(MAPPED, question.number, memory.id, memory.nbytes, held.selection.key)
        channel.send(head, descriptors=descriptors)
        request.is_mapped = True

    def _base(self, question: Question, held: HeldVersion) -> HeldVersion | None:
        """Return the version that the reader has, if this process has it, too; in use from now on."""
        for each in self._versions.values():
            if each.version.key == question.base and each.is_complete and each.is_like(held):
                each.use()
                return each
        if question.base and not held.is_complete:
            # Its reader gets differences from another source faster than this process gets the version.
            raise UnsupportedError("it is getting this version whole, and has no differences yet")
        return None

    async def _stream(
        self, channel: PeerChannel, question: Question, held: HeldVersion, base: HeldVersion | None
    ) -> None:
        selection = held.selection
        is_part = question.selection != selection.key
        if is_part:
            selection = Selection.of_description(selection.layout, question.parts)
        if selection.key != question.selection or (is_part and held.selection.key):
            raise UnsupportedError("it has another part of this version")
        blocks, sent = selection.layout.blocks, question.first
        sizes, asked = [block.nbytes for block in blocks], sent
        gathering: deque[asyncio.Future[tuple[list[memoryview], NDArray[np.uint64]]]] = deque()
        try:
            while sent < len(blocks):
                here = len(blocks) * held.is_complete if is_part else held.num_blocks
                if here <= sent:
                    await self._wait(channel, question, held)
                    continue
                if not (is_part or question.base):
                    end = group_end(sizes, sent, here)
                    buffers, digests = [held.array(block).data for block in blocks[sent:end]], held.digests[sent:end]
                else:
                    while asked < here and len(gathering) < _SHARES_AHEAD:
                        end = group_end(sizes, asked, here, _SHARE_NBYTES)
                        call = self._comparing.submit(_gather, held, selection, range(asked, end), question.base, base)
                        gathering.append(asyncio.wrap_future(call))
                        asked = end
                    buffers, digests = await gathering.popleft()
                    # Not in the thread: if this request has ended, the memory may have been written again.
                    if not is_part:
                        held.keep_differences(question.base, sent, buffers)
                await _deliver(channel, question.number, sent, buffers, digests)
                sent += len(buffers)
        finally:
            for each in gathering:
                each.cancel()

    @staticmethod
    async def _wait(channel: PeerChannel, question: Question, held: HeldVersion) -> None:
        """Wait for a block, and tell the reader now and then that this process is alive."""
        if held.is_abandoned:
            raise UnsupportedError("it has given this version up")
        if not await held.changed(_SIGN):
            channel.send(encode(ALIVE, question.number))


async def _deliver(
    channel: PeerChannel, number: int, first: int, buffers: list[memoryview], digests: NDArray[np.uint64]
) -> None:
    """Send blocks from a number on, or their differences, in messages of about a block."""
    sizes, at = [buffer.nbytes for buffer in buffers], 0
    while at < len(buffers):
        end = group_end(sizes, at, len(sizes))
        head = encode(BLOCKS, number, first + at, digests[at:end].astype("<u8").tobytes())
        await channel.deliver(head, buffers[at:end])
        at = end


def _gather(
    held: HeldVersion, selection: Selection, numbers: range, key: str, base: HeldVersion | None
) -> tuple[list[memoryview], NDArray[np.uint64]]:
    """Return blocks, or how they differ from those of the version with a key if that is shorter, and their digests."""
    is_part = selection.key != held.selection.key
    buffers, digests = [], []
    for number in numbers:
        block = selection.layout.blocks[number]
        array, changes = held.bytes_of(selection, block), None
        digests.append(digest(array) if is_part else int(held.digests[number]))
        if not is_part:
            changes = held.difference(number, key, base) if key else None
        elif base is not None:
            changes = difference(base.bytes_of(selection, block), array, block.place.dtype.itemsize)
        buffers.append(array.data if changes is None else memoryview(changes))
    return buffers, np.array(digests, dtype=np.uint64)
