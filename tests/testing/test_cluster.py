"""Ranks in threads: `run_ranks` reports the errors of all of them."""

from __future__ import annotations

import pytest

from asyncdist.testing.cluster import run_ranks


def test_error_of_the_lowest_rank_names_those_of_the_others():
    def program(group):
        raise ValueError(f"mistake {group.rank()}")

    with pytest.raises(ValueError, match="mistake 0") as caught:
        run_ranks(3, program)
    assert sorted(caught.value.__notes__) == [
        "rank 1 raised ValueError: mistake 1",
        "rank 2 raised ValueError: mistake 2",
    ]
