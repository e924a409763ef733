"""What the processes of the benchmark of remote calls call. A module, because torch sends functions by their names."""

from __future__ import annotations

from typing import Any

OBJECTS = 125
"""The objects under the name "many" in each process."""


class CalledObject:
    """An object that is called."""

    async def increment(self, number: int) -> int:
        return number + 1

    async def count_bytes(self, tensor: Any) -> int:
        return int(tensor.nbytes)


def increment(number: int) -> int:
    return number + 1


def count_bytes(tensor: Any) -> int:
    return int(tensor.nbytes)
