"""Segments of shared memory that one process writes and others map."""

import errno
import gc
import mmap
import os
from pathlib import Path

import pytest
import torch

from asyncdist.errors import ProtocolError, SharedMemoryError
from asyncdist.kernel.memory.shared_arena import Arena, ArenaMapping
from asyncdist.kernel.memory.shared_segment import ReadMapping, SharedSegment, can_share_segments

pytestmark = pytest.mark.skipif(not can_share_segments(), reason="this system has no anonymous shared memory")


def mapped(segment: SharedSegment) -> ReadMapping:
    return ReadMapping(os.dup(segment.fileno()), segment.nbytes, segment.id)


def test_reader_sees_what_the_owner_writes():
    segment = SharedSegment(10_000)
    mapping = mapped(segment)
    segment.bytes.fill_(3)
    assert (mapping.bytes == 3).all()
    assert mapping.nbytes == segment.nbytes == 3 * mmap.PAGESIZE


def test_what_a_reader_writes_is_its_own_until_it_renews():
    segment = SharedSegment(64 * mmap.PAGESIZE)
    segment.bytes.fill_(1)
    mapping, other = mapped(segment), mapped(segment)
    mapping.renew()
    mapping.bytes[5 * mmap.PAGESIZE] = 9
    assert (segment.bytes == 1).all()
    assert (other.bytes == 1).all()
    segment.bytes.fill_(2)
    assert mapping.bytes[5 * mmap.PAGESIZE] == 9  # the copy of this page hides the new content
    mapping.renew()
    assert (mapping.bytes == 2).all()


def test_reader_without_pagemap_renews_too(monkeypatch):
    segment = SharedSegment(64 * mmap.PAGESIZE)
    mapping = mapped(segment)
    mapping.renew()
    mapping.bytes[0] = 9
    monkeypatch.setattr(os, "pread", lambda *args: b"")
    mapping.renew()
    assert mapping.bytes[0] == 0


@pytest.mark.parametrize("failing", ["asyncdist.kernel.memory.shared_arena.ArenaMapping", "os.ftruncate"])
def test_segment_of_a_process_that_cannot_be_made_leaves_no_descriptor(monkeypatch, failing):
    def fail(*args, **options):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(failing, fail)
    with pytest.raises(SharedMemoryError, match="Cannot allocate memory"):
        Arena()
    assert len(os.listdir("/proc/self/fd")) == before


def test_mapping_holds_no_descriptor_and_ends_with_its_last_view():
    before, arena = len(os.listdir("/proc/self/fd")), Arena()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    words = arena.mapping.words(0, 2)
    tensor = ArenaMapping(arena.descriptor, arena.nbytes).tensor(8, 1, torch.int64)
    where = f"{tensor.data_ptr() - 8:x}-"
    arena.reserve(0, 16)
    del arena
    words[1] = 7
    assert tensor.item() == 7
    assert where in Path("/proc/self/maps").read_text()
    del tensor
    gc.collect()
    assert where not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == before


def test_segment_for_which_no_addresses_are_left_is_an_error():
    descriptor = os.memfd_create("large")
    try:
        os.ftruncate(descriptor, 1 << 50)
        with pytest.raises(SharedMemoryError, match="Cannot allocate memory"):
            ArenaMapping(descriptor, 1 << 50)
        with pytest.raises(SharedMemoryError, match="smaller"):
            ArenaMapping(descriptor, 1 << 51)
    finally:
        os.close(descriptor)


def test_no_other_mapping_can_write_the_segment():
    segment = SharedSegment(4096)
    with pytest.raises(PermissionError):
        mmap.mmap(segment.fileno(), 4096)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(segment.fileno(), 0)


def test_mapping_outlives_the_owner_and_its_descriptor():
    segment = SharedSegment(4096)
    segment.bytes.fill_(7)
    tensor = mapped(segment).bytes
    segment.close()
    assert segment.fileno() == -1
    del segment
    gc.collect()
    assert torch.equal(tensor, torch.full((4096,), 7, dtype=torch.uint8))


def test_segment_that_is_smaller_than_told_is_refused():
    segment = SharedSegment(4096)
    with pytest.raises(ProtocolError, match="4096 bytes"):
        ReadMapping(os.dup(segment.fileno()), 1 << 60, segment.id)
