"""Tests whose body runs on every rank of a world in this process, and what they look at in a group."""

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

from asyncdist.testing.cluster import run_ranks, world_of


def on_ranks(size: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test once on each of ``size`` ranks: in threads, or as tasks if it is a coroutine function.

    Its argument ``group`` is the rank's group. The others are fixtures and parameters, which the ranks share.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def run(**shared: Any) -> None:
                async with world_of(size) as groups:
                    await asyncio.gather(*(test(group=group, **shared) for group in groups))
        else:

            @functools.wraps(test)
            def run(**shared: Any) -> None:
                run_ranks(size, lambda group: test(group=group, **shared))

        others = [each for each in inspect.signature(test).parameters.values() if each.name != "group"]
        run.__signature__ = inspect.Signature(others)
        return run

    return decorate


def native_of(group: Any) -> Any:
    """Return the native collectives of a group, such as those in shared memory."""
    return group.context.native
