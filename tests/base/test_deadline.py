"""Times that users pass, in the forms that system calls take."""

import math
import select

import pytest

from asyncdist.base.deadline import poll_timeout


@pytest.mark.parametrize(
    ("left", "milliseconds"),
    [(0.0, 0), (-1.0, 0), (0.0001, 1), (2.5, 2500), (180_000_000.0, 2**31 - 1), (1e300, 2**31 - 1), (math.inf, None)],
)
def test_seconds_become_the_milliseconds_of_a_poll(left, milliseconds):
    assert poll_timeout(left) == milliseconds


def test_longest_timeout_fits_into_a_poll():
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    assert poll.poll(poll_timeout(1e300))
