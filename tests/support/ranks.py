"""Tests whose body runs on every rank of a world in this process, cases on all ranks, and what tests look at in a group."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from asyncdist.testing.cluster import run_ranks, world_of
from asyncdist.testing.collective_cases import CollectiveCase


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


async def sums(groups: Iterable[Any], count: int = 1) -> list[float]:
    """All-reduce the ids of the members, ``count`` times in one tensor; return what each member has got."""
    tensors = {group: torch.full((count,), float(group.endpoint.rank)) for group in groups}
    await asyncio.gather(*(group.all_reduce(tensor) for group, tensor in tensors.items()))
    assert all(bool((tensor == tensor[0]).all()) for tensor in tensors.values())
    return [tensor[0].item() for tensor in tensors.values()]


async def run_cases(groups: Sequence[Any], cases: Iterable[CollectiveCase]) -> None:
    """Run each case on all groups, one case after the other."""
    for case in cases:
        await run_at_once(groups, [case])


async def run_at_once(groups: Sequence[Any], cases: Iterable[CollectiveCase]) -> None:
    """Start all cases on all groups, and await them in the reverse order."""
    started = list(cases)
    works = [work for case in started for group in groups for work in case.start(group)]
    await asyncio.gather(*reversed(works))
    for case in started:
        case.check()
