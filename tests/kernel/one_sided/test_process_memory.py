"""The memory of another process: what is copied, and when it is out of reach."""

import os
import signal

import pytest
import torch

from asyncdist.kernel.one_sided.process_memory import OutOfReachError, ProcessMemory
from asyncdist.net.process_identity import process_identity


@pytest.fixture
def child():
    """A forked process that has this process's tensors at their addresses: its identity."""
    pid = os.fork()
    if not pid:
        signal.pause()
    yield {**process_identity(), "pid": pid, "started": started_of(pid)}
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def started_of(pid):
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rpartition(b") ")[2].split()[19])


SHOWN = torch.arange(3_000_000) % 251


def test_memory_of_the_process_is_read_and_written(child):
    memory = ProcessMemory(child, process_identity())
    ours = torch.zeros_like(SHOWN)
    memory.copy(SHOWN.data_ptr(), memoryview(ours.numpy()).cast("B"), False)
    assert torch.equal(ours, SHOWN)
    memory.copy(SHOWN.data_ptr(), memoryview((ours + 1).numpy()).cast("B"), True)
    memory.copy(SHOWN.data_ptr(), memoryview(ours.numpy()).cast("B"), False)
    assert torch.equal(ours, SHOWN + 1), "the child has its own copy of the page, which was written"


def test_memory_that_is_not_there_is_out_of_reach(child):
    memory = ProcessMemory(child, process_identity())
    with pytest.raises(OutOfReachError):
        memory.copy(8, memoryview(bytearray(8)), False)


@pytest.mark.parametrize("changed", [{"started": 1}, {"pids": "pid:[1]"}, {"host": "another"}])
def test_another_process_of_this_number_is_never_reached(child, changed):
    with pytest.raises(OutOfReachError):
        ProcessMemory({**child, **changed}, process_identity())
    with pytest.raises(OutOfReachError):
        ProcessMemory(None, process_identity())


def test_ended_process_is_out_of_reach():
    pid = os.fork()
    if not pid:
        signal.pause()
    memory = ProcessMemory({**process_identity(), "pid": pid, "started": started_of(pid)}, process_identity())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(OutOfReachError):
        memory.copy(SHOWN.data_ptr(), memoryview(bytearray(8)), False)
