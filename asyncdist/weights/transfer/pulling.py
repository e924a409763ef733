"""The receiving half of an exchange: gets a version from one source, by mapping its memory or block by block."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncdist.base.callables import Callback
from asyncdist.errors import AsyncdistError, ProtocolError
from asyncdist.kernel import ReadMapping
from asyncdist.net import IncomingMessage, PeerChannel
from asyncdist.weights.content.digest import DIGEST_NBYTES
from asyncdist.weights.errors import DigestError, WeightsError
from asyncdist.weights.transfer.held_version import HeldVersion
from asyncdist.weights.transfer.serving import STALL
from asyncdist.weights.transfer.transfer_messages import END, Question, encode

_MOST_MAPPINGS = 4
"""The segments of one source that stay mapped, because a source alternates between few."""


@dataclass(frozen=True, slots=True)
class MappedSource:
    """The mapped memory of a source.

    It has the ``selection`` of this key: all of the version, or what the reader asked for. ``end`` tells the source that
    the memory is not read any more.
    """

    mapping: ReadMapping
    selection: str
    end: Callback


class Pull:
    """One request to one source.

    Attributes:
        held: What is filled.
        first: The first block that no message has announced.
        outcome: Ends with the mapping and the key of its selection, or with None once all blocks are here; or with why the
            source has failed.
    """

    def __init__(self, channel: PeerChannel, number: int, held: HeldVersion) -> None:
        self.channel, self.number, self.held = channel, number, held
        self.first = held.num_blocks
        self.base = held.base
        self.outcome: asyncio.Future[tuple[ReadMapping, str] | None] = asyncio.get_running_loop().create_future()
        self.arriving: dict[IncomingMessage, None] = {}
        self.signs = 0
        self._verified: set[int] = set()

    @property
    def progress(self) -> tuple[int, int]:
        """A value that changes when anything arrives."""
        return self.signs, sum(message.left for message in self.arriving)

    def fail(self, error: AsyncdistError) -> None:
        """End with an error, unless it has ended."""
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def announce(self, first: int, digests: bytes, sizes: Sequence[int]) -> range:
        """Check blocks that the source begins to send, and return their numbers. Raises ProtocolError."""
        numbers = range(first, first + len(sizes))
        blocks = self.held.blocks[first : numbers.stop] if first == self.first else []
        fits = len(blocks) == len(sizes) and all(
            size == block.nbytes or (self.base is not None and size < block.nbytes)
            for block, size in zip(blocks, sizes, strict=True)
        )
        if not fits or len(digests) != DIGEST_NBYTES * len(sizes) or not sizes:
            raise ProtocolError(f"blocks {first} to {numbers.stop} of {self.held.version}, which were not expected")
        if self.held.selection.key:
            self.held.digests[first : numbers.stop] = np.frombuffer(digests, "<u8")
        self.first = numbers.stop
        self.signs += 1
        return numbers

    def arrived(self, numbers: range, buffers: Sequence[memoryview]) -> None:
        """Verify blocks whose bytes, or differences, are here."""
        held = self.held
        self.signs += 1
        for number, buffer in zip(numbers, buffers, strict=True):
            if not held.arrive(number, buffer, self.base):
                name = held.blocks[number].place.name
                self.fail(DigestError(name, self.channel.peer.name, str(held.version)))
                return
        if self.base is not None:
            held.keep_differences(self.base.version.key, numbers.start, buffers)
        self._verified.update(numbers)
        here = held.num_blocks
        while here in self._verified:
            self._verified.discard(here)
            here += 1
        held.advance(here)
        if held.is_complete and not self.outcome.done():
            self.outcome.set_result(None)


class VersionPuller:
    """Asks sources for versions, and takes their messages."""

    def __init__(self) -> None:
        self._pulls: dict[tuple[PeerChannel, int], Pull] = {}
        self._numbers = itertools.count(1)
        self._mappings: dict[PeerChannel, OrderedDict[str, ReadMapping]] = {}

    async def pull(self, channel: PeerChannel, entry: str, held: HeldVersion, *, maps: bool) -> MappedSource | None:
        """Get a version from a source.

        It fills ``held`` from the first block that it lacks on, and returns None; with ``maps`` it maps the memory of the
        source instead of copying its blocks.

        Raises:
            AsyncdistError: The source does not have it any more, has stalled, has sent wrong bytes, or was lost.
        """
        number = next(self._numbers)
        pull = self._pulls[channel, number] = Pull(channel, number, held)
        known = list(self._mappings.get(channel, ())) if maps else []
        parts = held.selection.describe() if held.selection.key and not maps else None
        base = held.base.version.key if held.base is not None and not maps else ""
        question = Question(number, entry, held.selection.key, parts, pull.first, maps, known, base)
        try:
            head, buffers = question.encode()
            channel.send(head, buffers)
            await self._wait(pull)
            mapped = pull.outcome.result()
        except BaseException:
            self._end(channel, number)
            raise
        finally:
            del self._pulls[channel, number]
            for message in list(pull.arriving):
                channel.drop(message, WeightsError("the reader has ended its request"))
        return None if mapped is None else MappedSource(*mapped, end=lambda: self._end(channel, number))

    @staticmethod
    async def _wait(pull: Pull) -> None:
        while True:
            before = pull.progress
            await asyncio.wait([pull.outcome], timeout=STALL)
            if pull.outcome.done():
                return
            if pull.progress == before:
                pull.outcome.cancel()
                raise WeightsError(f"{pull.channel.peer.name} has sent nothing for {STALL:g} s")

    @staticmethod
    def _end(channel: PeerChannel, number: int) -> None:
        if channel.error is None:
            channel.send(encode(END, number))

    def opened(self, channel: PeerChannel, message: IncomingMessage, fields: Sequence[Any]) -> None:
        """Provide the memory of blocks that begin to arrive."""
        pull = self._pulls.get((channel, fields[0]))
        if pull is None or pull.outcome.done():
            channel.drop(message, WeightsError("the reader has ended its request"))
            return
        numbers = self._announce(pull, fields, message.sizes)
        if numbers is None:
            channel.drop(message, WeightsError("these blocks were not expected"))
            return
        blocks = pull.held.blocks[numbers.start : numbers.stop]
        message.buffers = [
            pull.held.array(block).data if size == block.nbytes else memoryview(bytearray(size))
            for block, size in zip(blocks, message.sizes, strict=True)
        ]
        message.context = pull, numbers
        pull.arriving[message] = None

    def completed(self, message: IncomingMessage) -> None:
        if message.context is not None:
            pull, numbers = message.context
            pull.arriving.pop(message, None)
            if message.error is None and not pull.outcome.done():
                pull.arrived(numbers, message.buffers)

    def withdrawn(self, message: IncomingMessage) -> None:
        if message.context is not None:
            pull, _ = message.context
            pull.arriving.pop(message, None)
            pull.fail(WeightsError(f"{pull.channel.peer.name} has stopped sending"))

    def received(self, channel: PeerChannel, fields: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        pull = self._pulls.get((channel, fields[0]))
        if pull is None or pull.outcome.done():
            return
        numbers = self._announce(pull, fields, [buffer.nbytes for buffer in buffers])
        if numbers is not None:
            for number, buffer in zip(numbers, buffers, strict=True):
                block = pull.held.blocks[number]
                if buffer.nbytes == block.nbytes:
                    pull.held.array(block)[:] = np.frombuffer(buffer, np.uint8)
            pull.arrived(numbers, buffers)

    @staticmethod
    def _announce(pull: Pull, fields: Sequence[Any], sizes: Sequence[int]) -> range | None:
        try:
            _, first, digests = fields
            return pull.announce(first, digests, sizes)
        except (ProtocolError, TypeError, ValueError) as error:
            pull.fail(WeightsError(f"{pull.channel.peer.name} has sent {error}"))
            return None

    def mapped(self, channel: PeerChannel, fields: Sequence[Any], descriptors: list[int]) -> None:
        """Map the memory of a source; takes the descriptor out of the list."""
        number, segment, nbytes, selection = fields
        pull = self._pulls.get((channel, number))
        if pull is None or pull.outcome.done():
            return
        mappings = self._mappings.setdefault(channel, OrderedDict())
        try:
            if segment not in mappings:
                if not descriptors:
                    raise ProtocolError("no descriptor came with the memory of the source")
                mappings[segment] = ReadMapping(descriptors.pop(), nbytes, segment)
            if selection not in ("", pull.held.selection.key):
                raise ProtocolError("the source has mapped another part of the version")
        except AsyncdistError as error:
            pull.fail(error)
            return
        mappings.move_to_end(segment)
        while len(mappings) > _MOST_MAPPINGS:
            mappings.popitem(last=False)
        pull.outcome.set_result((mappings[segment], selection))

    def alive(self, channel: PeerChannel, number: int) -> None:
        if (pull := self._pulls.get((channel, number))) is not None:
            pull.signs += 1

    def refused(self, channel: PeerChannel, number: int, reason: str) -> None:
        if (pull := self._pulls.get((channel, number))) is not None:
            pull.fail(WeightsError(f"{channel.peer.name} refuses: {reason}"))

    def forget_segment(self, channel: PeerChannel, segment: str) -> None:
        """Unmap a segment that the source will not use again, as soon as no tensor needs it."""
        if (mappings := self._mappings.get(channel)) is not None:
            mappings.pop(segment, None)

    def closed(self, channel: PeerChannel, error: AsyncdistError) -> None:
        self._mappings.pop(channel, None)
        for pull in list(self._pulls.values()):
            if pull.channel is channel:
                pull.arriving.clear()
                pull.fail(error)
