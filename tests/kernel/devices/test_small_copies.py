"""Small copies to a device in two rows, over a pretended driver: what is copied, and when its memory is used again."""

import ctypes

import pytest
import torch

from asyncdist.kernel.devices import small_copies
from asyncdist.kernel.devices.small_copies import SmallCopies
from tests.support.devices import PretendStreams


class Driver:
    """Copies at once, as ``cuMemcpy2DAsync`` would, and keeps where it has read. ``status`` is what it returns."""

    def __init__(self):
        self.status = 0
        self.sources = []

    def __call__(self, how, stream):
        how = how._obj
        if self.status:
            return self.status
        assert how.src_pitch > how.width == how.dst_pitch, "adjacent rows would be one row"
        self.sources.append(how.src_host)
        for row in range(how.height):
            ctypes.memmove(how.dst_device + row * how.dst_pitch, how.src_host + row * how.src_pitch, how.width)
        return 0


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(small_copies, "_copy_2d", lambda: driver)
    # Pinned memory needs a device.
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    return driver


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("count", [2, 1000, 4094])
def test_both_rows_arrive(driver, count, dtype):
    wanted = torch.arange(count).to(dtype)
    found = torch.zeros(count, dtype=dtype)
    assert SmallCopies(PretendStreams()).copy(found, wanted) is not None
    assert torch.equal(found, wanted)
    assert len(driver.sources) == 1


@pytest.mark.parametrize("nbytes", [0, 3, 32 << 10, 1 << 20], ids=["nothing", "odd", "limit", "large"])
def test_other_copies_are_left_to_torch(driver, nbytes):
    copies = SmallCopies(PretendStreams())
    assert copies.copy(torch.zeros(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)) is None
    assert not driver.sources


def test_refused_copy_is_left_to_torch(driver):
    driver.status = 1
    assert SmallCopies(PretendStreams()).copy(torch.zeros(4), torch.ones(4)) is None


def test_memory_is_used_again_only_after_its_copy(driver, monkeypatch):
    monkeypatch.setattr(small_copies, "_MOST_IN_FLIGHT", 3)
    streams = PretendStreams()
    copies = SmallCopies(streams)
    streams.hold()
    events = [copies.copy(torch.zeros(4), torch.ones(4)) for _ in range(4)]
    assert [event is None for event in events] == [False, False, False, True]
    assert len(set(driver.sources)) == 3
    streams.release()
    assert copies.copy(torch.zeros(4), torch.ones(4)) is not None
    assert len(set(driver.sources)) == 3
