"""Attempts to run a schedule in the calling thread."""

from typing import Any

from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.engine.progress import Progress


def completes(progress: Progress, schedule: Schedule, group: Any, **options: Any) -> bool:
    """Attempt to run a schedule inline as the first call of a group; return whether it is complete."""
    return progress.attempt(lambda number: schedule, 1, (), group, **options) is None
