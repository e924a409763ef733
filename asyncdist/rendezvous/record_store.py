"""Where rank 0 leaves the address of its store: one record under one key, in whatever all ranks can reach already.

A record may be stale: left by a run that was killed, or by the world before. Nothing here can tell; `joining` finds
out by trying, and reads again. All that a place must offer is a compare-and-set of one value:

    the value is ``expected``, or absent and ``expected`` is empty   →   becomes ``desired``; returns it
    absent and ``expected`` is not empty                             →   stays absent; returns ``expected``
    anything else                                                    →   stays; returned
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from asyncdist.base.background_loop import on_loop
from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.base.error_text import first_line
from asyncdist.errors import AddressError, AsyncdistError, RendezvousError
from asyncdist.store.base import AsyncStoreBase

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AddressRecord:
    """What rank 0 publishes. ``token`` is the one that rank 0 made; None where every rank has it by other means."""

    host: str
    port: int
    token: str | None
    world_id: str
    world_size: int

    def encode(self) -> bytes:
        return json.dumps({"asyncdist": 1, **asdict(self)}).encode()

    @classmethod
    def decode(cls, data: bytes) -> AddressRecord | None:
        """Return the record, or None if these bytes are not one."""
        try:
            fields = json.loads(data)
            if fields.pop("asyncdist") != 1:
                return None
            record = cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        words = isinstance(record.host, str) and isinstance(record.world_id, str)
        numbers = isinstance(record.port, int) and isinstance(record.world_size, int)
        return record if words and numbers and isinstance(record.token, str | None) else None


class BlockingCaller:
    """A thread for calls that block, such as those of torch's stores.

    A thread cannot be interrupted. A call that is cancelled is waited out, so that nothing goes on afterwards.
    """

    def __init__(self) -> None:
        self._executor = DaemonThreadPool("asyncdist-rendezvous", max_threads=1)

    async def __call__(self, function: Callable[..., T], *args: Any) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args))
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else may look at it
        try:
            await asyncio.wait([future])  # shield() would log what becomes of it after a cancellation
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
        return future.result()

    def close(self) -> None:
        """Let the thread end."""
        self._executor.shutdown(cancel_futures=True)


class RecordStore(ABC):
    """One value that every rank can see. ``where`` names it in errors."""

    def __init__(self, where: str) -> None:
        self.where = where

    @abstractmethod
    async def read(self) -> bytes:
        """Return the value now; empty if there is none."""

    @abstractmethod
    async def swap(self, expected: bytes, desired: bytes) -> bytes:
        """Compare and set, as the head of this file defines it."""

    async def withdraw(self, value: bytes) -> None:
        """Empty the place if it still holds ``value``."""
        await self.swap(value, b"")

    async def close(self) -> None:  # noqa: B027  # most have nothing to let go of
        """Let go of what was opened to reach the place; the value stays."""


class AsyncStoreRecords(RecordStore):
    """A key of an awaited store, on the loop that it lives on: the running one, if none is named."""

    def __init__(
        self, store: AsyncStoreBase, key: str, where: str, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        super().__init__(where)
        self._store = store
        self._key = key
        self._loop = loop

    async def read(self) -> bytes:
        async def look() -> bytes:
            return await self._store.get(self._key) if await self._store.check([self._key]) else b""

        return await on_loop(self._loop, look())

    async def swap(self, expected: bytes, desired: bytes) -> bytes:
        async def exchange() -> bytes:
            return await self._store.compare_set(self._key, expected, desired)

        return await on_loop(self._loop, exchange())


class OwnedStoreRecords(AsyncStoreRecords):
    """A key of rank 0's own store, known by its address alone."""

    async def withdraw(self, value: bytes) -> None:
        if await self.swap(value, b"") == b"":
            await self._store.delete_key(self._key)  # so that whoever comes next waits for the next record


class DaemonRecords(OwnedStoreRecords):
    """A key of a store daemon, over a connection of the place's own. A record goes with the rank that left it there."""

    async def swap(self, expected: bytes, desired: bytes) -> bytes:
        found = await super().swap(expected, desired)
        if desired and found == desired:
            await self._store.set(self._key, desired, ephemeral=True)
        return found

    async def close(self) -> None:
        await self._store.close()


class BlockingStore(Protocol):
    """What is asked of a store: torch's, ours, or a file's."""

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes: ...


class BlockingStoreRecords(RecordStore):
    """A key of a store whose calls block: torch's, our own by torch's names, or a `RecordFile`."""

    def __init__(self, store: BlockingStore, key: str, where: str, caller: BlockingCaller | None = None) -> None:
        super().__init__(where)
        self._store: BlockingStore | None = store
        self._key = key
        self._caller = caller or BlockingCaller()

    async def read(self) -> bytes:
        return await self._call(lambda store: store.get(self._key) if store.check([self._key]) else b"")

    async def swap(self, expected: bytes, desired: bytes) -> bytes:
        return await self._call(lambda store: store.compare_set(self._key, expected, desired))

    async def _call(self, ask: Callable[[BlockingStore], bytes]) -> bytes:
        assert self._store is not None, "the place has been closed"
        try:
            return bytes(await self._caller(ask, self._store))
        except AsyncdistError:
            raise
        except (RuntimeError, OSError) as error:  # torch's stores raise RuntimeError and its children
            said = first_line(error)
            raise RendezvousError(f"cannot use {self.where}: {said}; see whether it is still served") from error

    async def close(self) -> None:
        self._store = None  # torch's client hangs up when it is collected
        self._caller.close()


class RecordFile:
    """A file that holds one record, readable by its owner alone because the record may hold the token.

    In a folder, the file is named after the world; in a file, the unnamed world takes the file itself and a named one
    a file beside it. It is replaced in one step, so that nobody reads half a record.
    """

    def __init__(self, path: str, name: str) -> None:
        base, suffix = Path(path), quote(name, safe="")
        if base.is_dir():
            self.path = base / f"asyncdist{'-' + suffix if name else ''}.json"
        else:
            self.path = base.with_name(base.name + ("." + suffix if name else ""))
        if not self.path.parent.is_dir():
            raise AddressError(f"the folder of file://{path} does not exist; make it where every rank sees it")

    def check(self, keys: list[str], /) -> bool:
        return bool(self._read())

    def get(self, key: str, /) -> bytes:
        return self._read() or b""

    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes:
        present = self._read()
        if present is None and expected:
            return expected
        if present is not None and present != expected:
            return present
        if not desired:
            self.path.unlink(missing_ok=True)
            return desired
        return desired if self._write(desired, fresh=present is None) else self._read() or b""

    def _read(self) -> bytes | None:
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise AddressError(f"file://{self.path} is neither a file nor a folder; name another")
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        if data and AddressRecord.decode(data) is None:
            raise AddressError(f"file://{self.path} holds something that is not ours; name another file, or remove it")
        return data

    def _write(self, data: bytes, *, fresh: bool) -> bool:
        draft = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if not fresh:
                draft.replace(self.path)
                return True
            os.link(draft, self.path)  # unlike a rename, it fails where somebody was faster
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP) or not fresh:
                raise
            draft.replace(self.path)  # a file system without hard links
        finally:
            draft.unlink(missing_ok=True)
        return True
