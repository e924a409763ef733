"""References, which travel in place of an `RRef` or a `RemoteModule`. The receiver makes such an object of them again."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any, Self

from asyncdist.base.lifecycle import ProcessBound
from asyncdist.rpc.blocking.agent import WorkerInfo, current_agent
from asyncdist.rpc.references import RemoteReference

_classes: dict[str, type[Referring]] = {}


class Referring(ProcessBound):
    """An object of this process that stands for an object of a worker, by a reference that may still be on its way.

    A derived class names the ``kind`` of the references that it stands for; without one it stands for all others.
    """

    _elsewhere = "pass it to a function of a worker as an argument, or in a list or dict, and not inside another object"

    _info: WorkerInfo
    _reference: concurrent.futures.Future[RemoteReference]

    def __init_subclass__(cls, kind: str = "", **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        _classes[kind] = cls

    @classmethod
    def standing_for(cls, info: WorkerInfo, reference: concurrent.futures.Future[RemoteReference]) -> Self:
        """Make an object that stands for a reference."""
        made = cls.__new__(cls)
        made._info, made._reference = info, reference
        return made


async def ready(part: Any) -> Any:
    """Replace each `Referring` inside lists, tuples and dictionaries by its reference, once its object exists."""
    if isinstance(part, Referring):
        return await asyncio.wrap_future(part._reference)
    if type(part) in (list, tuple):
        return type(part)([await ready(each) for each in part])
    if type(part) is dict:
        return {key: await ready(each) for key, each in part.items()}
    return part


def arrived(part: Any) -> Any:
    """Replace each reference inside lists, tuples and dictionaries by a `Referring`."""
    if isinstance(part, RemoteReference):
        made: concurrent.futures.Future[RemoteReference] = concurrent.futures.Future()
        made.set_result(part)
        return _classes.get(part.kind, _classes[""]).standing_for(current_agent().owner_of(part), made)
    if type(part) in (list, tuple):
        return type(part)([arrived(each) for each in part])
    if type(part) is dict:
        return {key: arrived(each) for key, each in part.items()}
    return part
