"""Fixtures of the tests of devices: ranks with pretended devices."""

import itertools

import pytest

from tests.support.cuda import cuda_ipc_over
from tests.support.devices import PretendStreams, run_on_devices


@pytest.fixture
def run(until):
    """Run ``program(device)`` on each rank's device, and check that nothing stays mapped or allocated.

    By default the back end is cuda_ipc with these ``options``, and ``device.drivers`` are the drivers of the rank. ``made``
    gets all drivers. ``refusing`` is a rank that cannot map memory.
    """

    def run(
        size, program, *, made=None, kinds=None, streams=None, transport="inproc", hosts=None, refusing=None, **options
    ):
        made = [] if made is None else made
        drivers = [[] for _ in range(size)]
        classes = {rank: [cuda_ipc_over(drivers[rank], **options)] if kinds is None else kinds for rank in range(size)}
        if refusing is not None:
            classes[refusing] = [cuda_ipc_over(made, refuses=RuntimeError("no peer access")), *(kinds or ())[1:]]

        def with_drivers(device):
            device.drivers = drivers[device.rank()]
            result = program(device)
            assert kinds is not None or device.backend in (None, "cuda_ipc")
            return result

        streams = streams or [PretendStreams(f"GPU-{rank}") for rank in range(size)]
        try:
            return run_on_devices(size, with_drivers, classes.get, streams, transport=transport, hosts=hosts)
        finally:
            made += itertools.chain(*drivers)
            # An executor's thread may still release memory.
            until(lambda: not any(driver.mapped or driver.taken for driver in made))

    return run
