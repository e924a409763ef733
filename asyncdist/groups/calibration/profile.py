"""The measured values of a model: combined from all hosts, and in a file that replaces the measurement.

``asyncdist bench --calibrate FILE`` writes such a profile, and ASYNCDIST_PROFILE names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncdist.base.release import VERSION
from asyncdist.errors import UsageError
from asyncdist.kernel.algorithms.selection import Model

_FIELDS = ("alpha", "beta", "overhead")
FEW_LANES, MANY_LANES, MANY_LANES_WITH_THREADS = "few lanes", "many lanes", "many lanes with threads"
"""Measured seconds per byte of an all-reduce between two hosts, over `DEFAULT_LANES` TCP connections and over `LANES`."""
_LANES_FIELDS = (FEW_LANES, MANY_LANES, MANY_LANES_WITH_THREADS)
LANES = 4
"""Connections to a peer where many are faster than few."""
_WORTH = 0.8
"""The share of the time with fewer connections, or without threads, that more of them, or threads, may take."""

MODEL_FROM_PROFILE = "the profile that ASYNCDIST_PROFILE names"
"""The source of a model with the values of a profile."""

Values = dict[str, float]
"""Measured times in seconds: fields of a `Model`, and those that `lanes_of` compares, by name."""


def combined(results: Sequence[Values | None]) -> Values:
    """Return one value of each kind from those of all hosts: the slowest link decides, and the typical overhead."""
    found = [each for each in results if each]
    values = {name: [each[name] for each in found if name in each] for name in (*_FIELDS, *_LANES_FIELDS)}
    # What one host could not try is used on none.
    for name in _LANES_FIELDS:
        if len(values[name]) < len(values[FEW_LANES]):
            del values[name]
    typical = ("alpha", "overhead")
    return {name: float(np.median(each)) if name in typical else max(each) for name, each in values.items() if each}


def model_of(base: Model, values: Mapping[str, float], source: str) -> Model:
    """Return a model with some values replaced; ``source`` says in words where they are from."""
    if not values:
        return base
    alpha, beta, overhead = (float(values.get(name, getattr(base, name))) for name in _FIELDS)
    return replace(base, alpha=alpha, beta=beta, overhead=overhead, source=source)


def lanes_of(values: Mapping[str, float]) -> dict[str, Any]:
    """Return the settings of a `Config` with which large tensors cross the links fastest; empty for the defaults.

    More connections, and threads that use them, must be faster by a fifth.
    """
    few, many, threads = (values.get(name, math.inf) for name in _LANES_FIELDS)
    if math.isinf(few) or min(many, threads) > _WORTH * few:
        return {}
    return {"lanes": LANES} | ({"tcp_threads": "always"} if threads <= _WORTH * many else {})


def write_profile(path: Path, values: Values, about: Mapping[str, Any]) -> None:
    """Write a profile as JSON, with facts about the measurement."""
    text = json.dumps({"asyncdist": VERSION, **about, "seconds": values}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def read_profile(path: str) -> Values:
    """Return the values of a profile.

    Raises:
        UsageError: The file cannot be read, or is not a profile.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))["seconds"]
        found = {name: float(values[name]) for name in (*_FIELDS, *_LANES_FIELDS) if name in values or name in _FIELDS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"ASYNCDIST_PROFILE={path}: not a profile ({error}): write one with asyncdist bench --calibrate {path}"
        ) from None
    if not all(0.0 < value < 1e3 for value in found.values()):
        raise UsageError(f"ASYNCDIST_PROFILE={path}: its values are not times in seconds: measure them again")
    return found
