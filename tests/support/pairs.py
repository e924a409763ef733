"""Parametrisation by pairs: some of the combinations of several parameters, which contain each pair of values."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def each_pair(**parameters: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by combinations in which any two values of any two parameters come together at least once.

    Use it where a parameter may disturb another one, but three of them do not need each other for a failure.
    """
    places = [range(len(values)) for values in parameters.values()]
    missing = {
        ((one, i), (other, j))
        for one, other in itertools.combinations(range(len(places)), 2)
        for i, j in itertools.product(places[one], places[other])
    }
    rows = []
    while missing:
        pairs_of = {row: set(itertools.combinations(enumerate(row), 2)) for row in itertools.product(*places)}
        row = max(pairs_of, key=lambda row: len(pairs_of[row] & missing))
        missing -= pairs_of[row]
        rows.append(tuple(values[place] for values, place in zip(parameters.values(), row, strict=True)))
    return pytest.mark.parametrize(tuple(parameters), rows)
