"""The persistent collectives of the awaited and of the blocking API, made from the collectives of the awaited API."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from asyncdist.groups.default_world import resolve_group
from asyncdist.groups.persistent import PersistentCollective, Preparing, described
from asyncdist.kernel.engine.work import Work

T = TypeVar("T")
P = ParamSpec("P")


def awaited(call: Callable[P, Work[T]]) -> Callable[P, Work[PersistentCollective[T]]]:
    """Return the ``_init`` form of a collective of the awaited API."""

    def init(*args: P.args, **options: P.kwargs) -> Work[PersistentCollective[T]]:
        return _prepared(call, args, options, blocks=False)

    return described(init, call)


def blocking(call: Callable[P, Work[T]]) -> Callable[P, PersistentCollective[T]]:
    """Return the ``_init`` form of a collective of the blocking API, given that of the awaited API."""

    def init(*args: P.args, **options: P.kwargs) -> PersistentCollective[T]:
        return _prepared(call, args, options, blocks=True).result()

    return described(init, call, blocks=True)


def _prepared(call: Callable[..., Any], args: Any, options: Any, *, blocks: bool) -> Work[PersistentCollective[Any]]:
    given = inspect.signature(call).bind(*args, **options)
    given.arguments["group"] = Preparing(resolve_group(given.arguments.get("group")), blocks=blocks)
    work: Work[PersistentCollective[Any]] = call(*given.args, **given.kwargs)
    return work
