"""Ranks that map one another's memory of a device, over a pretended driver that keeps CUDA's rules on the host's.

Ranks are threads, so that "mapping" another's memory is knowing its address. What real hardware adds is in tests/gpu.
"""

from __future__ import annotations

import pytest
import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.errors import AsyncdistError, GroupError, MismatchError
from asyncdist.testing.cluster import run_ranks
from asyncdist.testing.collective_cases import collective_cases
from asyncdist.transport.device_streams import cuda_missing
from asyncdist_transports.cuda_ipc import collectives as module
from asyncdist_transports.cuda_ipc.driver import Driver
from asyncdist_transports.cuda_ipc.handles import NOTHING, ExportedMemory, Exports, Imports
from tests.support.cuda import HANDLE, PretendDriver, cuda_ipc_over
from tests.support.devices import PretendStreams, device_group


@pytest.fixture
def run(until):
    """Run ``program(group)`` on the device of each rank, and see that nothing stays mapped or allocated."""

    def run(size, program, *, made=None, transport="inproc", **keywords):
        made = [] if made is None else made
        ways = [cuda_ipc_over(made, **keywords)]

        def rank(group):
            device = device_group(group, ways)
            try:
                result = program(device)
                assert device.backend in (None, "cuda_ipc")
                return result
            finally:
                device.close()

        try:
            return run_ranks(size, rank, transport=transport)
        finally:
            until(lambda: not any(driver.mapped or driver.taken for driver in made))  # by a line's thread, perhaps

    return run


def drilled(size, dtype, counts=(1, 300, 40_000)):
    return [
        drill for count in counts for drill in collective_cases(size, count, dtype) if drill.name != "monitored_barrier"
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("small", [0, 64 << 10], ids=["all", "large"])
@pytest.mark.parametrize("shareable", [True, False], ids=["shown", "copied"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective(size, shareable, small, monkeypatch, run):
    monkeypatch.setattr(module, "_SMALL_NBYTES", small)
    todo = drilled(size, torch.float32)

    def program(group):
        for drill in todo:
            for work in drill.start(group):
                work.wait()

    run(size, program, shareable=shareable)
    for drill in todo:
        drill.check()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.int32, torch.uint16, torch.bool, torch.complex64]
)
def test_every_dtype(dtype, monkeypatch, run):
    monkeypatch.setattr(module, "_SMALL_NBYTES", 0)
    todo = drilled(3, dtype, (300,))

    def program(group):
        for drill in todo:
            for work in drill.start(group):
                work.wait()

    run(3, program)
    for drill in todo:
        drill.check()


def test_many_in_flight_background_and_blocking_in_turn(monkeypatch, run):
    monkeypatch.setattr(module, "_SMALL_NBYTES", 0)
    todo = drilled(3, torch.float32)

    def program(group):
        works = [
            work for n, drill in enumerate(todo) for work in drill.start(group, background=(n + group.rank()) % 3 != 0)
        ]
        for work in works:
            work.wait()

    run(3, program, transport="shm")
    for drill in todo:
        drill.check()


def test_unsigned_minima_go_through_the_host(monkeypatch, run):
    monkeypatch.setattr(module, "_SMALL_NBYTES", 0)

    def program(group):
        tensor = torch.tensor([group.rank(), 9 - group.rank()], dtype=torch.uint32)
        group.all_reduce(tensor, ReduceOp.MIN).wait()
        return tensor.tolist()

    assert run(2, program) == [[0, 8], [0, 8]]


def test_different_calls_are_told_apart(run):
    def program(group):
        tensor = torch.ones(100_000)
        work = group.broadcast(tensor, 0) if group.rank() else group.all_reduce(tensor)
        with pytest.raises(GroupError) as caught:
            work.wait()
        return caught.value

    errors = run(2, program)
    assert any(isinstance(error, MismatchError) for error in errors)
    assert all("broadcast" in str(error) and "all_reduce" in str(error) for error in errors)


def test_unequal_sizes_are_told_apart(run):
    def program(group):
        rank = group.rank()
        sent = [torch.ones(50_000) for _ in range(2)]
        came = [torch.empty(50_000 + (rank == 0 and peer == 1)) for peer in range(2)]
        with pytest.raises(GroupError) as caught:
            group.all_to_all(came, sent).wait()
        return str(caught.value)

    zero, one = run(2, program)
    assert "rank 1 sent 200000 bytes where 200004 were expected" in zero
    assert "200004" in one


# -- coming together --------------------------------------------------------------------------------


def test_ranks_of_several_hosts_go_through_the_host():
    ways = [cuda_ipc_over()]

    def rank(group):
        device = device_group(group, ways)
        device.all_reduce(tensor := torch.ones(100_000)).wait()
        way = device.backend
        device.close()
        return way, tensor[0].item()

    assert run_ranks(2, rank, hosts=["a", "b"]) == [("staged", 2.0)] * 2


def test_memory_that_cannot_be_mapped_on_one_rank_is_mapped_on_none(until):
    made = []
    ways = [cuda_ipc_over(made)]

    def rank(group):
        device = device_group(group, ways)
        if group.rank() == 1:
            broken = type(
                "Broken",
                (ways[0],),
                {"start": lambda self, all_capabilities: (_ for _ in ()).throw(RuntimeError("no peer access"))},
            )
            device._backend_classes[0] = broken
        device.all_reduce(tensor := torch.ones(100_000)).wait()
        way = device.backend
        device.close()
        return way, tensor[0].item()

    assert run_ranks(2, rank) == [("staged", 2.0)] * 2
    assert len(made) == 2
    until(lambda: not any(driver.mapped or driver.taken for driver in made))


def test_without_cuda_it_says_what_is_missing():
    assert "CUDA" in (Driver.missing() or "CUDA")
    if not torch.cuda.is_available():
        assert Driver.missing() == cuda_missing()
        with pytest.raises(AsyncdistError):
            Driver(torch.device("cuda", 0)).allocation(0)


# -- handles ----------------------------------------------------------------------------------------


def test_a_handle_is_made_once_for_an_allocation():
    exports = Exports(driver := PretendDriver())
    tensor = torch.ones(10)
    shown, first = exports.export(tensor, 0)
    assert shown is tensor
    assert exports.export(tensor, 0)[1] == first
    assert driver.handles == 1
    driver.numbers[tensor.data_ptr()] = 2  # freed, and its address given out again
    assert exports.export(tensor, 0)[1] != first
    assert driver.handles == 2


def test_nothing_is_shown_of_nothing():
    assert Exports(PretendDriver()).export(torch.empty(0), 0)[1] == NOTHING


def test_memory_that_cannot_cross_is_copied_into_memory_that_can():
    exports = Exports(driver := PretendDriver(shareable=False))
    tensor = torch.arange(10.0)
    copy, shown = exports.export(tensor, 0)
    assert copy is not tensor
    assert copy.tolist() == tensor.tolist()
    assert Imports(driver, lambda: None).open(0, shown).view(torch.float32).tolist() == tensor.tolist()
    again, _ = exports.export(tensor, 0)
    assert again.data_ptr() == copy.data_ptr()
    larger, _ = exports.export(torch.ones(1000), 0)
    assert larger.tolist() == [1.0] * 1000
    assert len(driver.taken) == 1
    other, _ = exports.export(tensor, 1)
    assert other.data_ptr() != larger.data_ptr()
    exports.close()
    assert not driver.taken


def test_a_mapping_is_kept_until_its_address_means_something_else():
    wait_until_idle = []
    imports = Imports(driver := PretendDriver(), lambda: wait_until_idle.append(True))
    tensor = torch.arange(4.0)
    base = tensor.data_ptr()
    before = ExportedMemory(base, 1, 4, 12, HANDLE.pack(base, 1))
    assert imports.open(1, before).view(torch.float32).tolist() == [1, 2, 3]
    assert imports.open(1, before._replace(offset=8, nbytes=8)).view(torch.float32).tolist() == [2, 3]
    assert (driver.maps, wait_until_idle) == (1, [])
    imports.open(1, before._replace(number=2))
    assert driver.maps == 2
    assert driver.mapped == {base: 1}
    assert wait_until_idle == [True], "unmapped while the queue may have used it"
    imports.open(0, before)
    assert driver.mapped == {base: 2}, "two ranks may give out the same address"
    imports.close()
    assert not driver.mapped


def test_mappings_are_bounded(monkeypatch):
    from asyncdist_transports.cuda_ipc import handles

    monkeypatch.setattr(handles, "_KEPT_MAPPINGS", 3)
    imports = Imports(driver := PretendDriver(), lambda: None)
    tensors = [torch.ones(4) for _ in range(10)]
    for tensor in tensors:
        base = tensor.data_ptr()
        imports.open(0, ExportedMemory(base, 1, 0, 16, HANDLE.pack(base, 1)))
        assert len(driver.mapped) <= 3
    assert set(driver.mapped) == {tensor.data_ptr() for tensor in tensors[-3:]}


def test_streams_meet_before_and_after(monkeypatch, run):
    """Events are recorded again only when all wait for what was recorded before (`TheirEvent` asserts it)."""
    monkeypatch.setattr(module, "_SMALL_NBYTES", 0)

    def program(group):
        tensor = torch.ones(1000)
        for _ in range(50):
            group.all_reduce(tensor, ReduceOp.AVG).wait()
        return tensor.sum().item()

    assert run(4, program, transport="shm") == [1000.0] * 4


def test_a_stream_of_the_callers_comes_first_and_follows():
    streams = PretendStreams()
    ways = [cuda_ipc_over()]

    def rank(group):
        device = device_group(group, ways, streams if group.rank() == 0 else None)
        device.all_reduce(torch.ones(100_000), background=False)
        device.close()

    run_ranks(2, rank)
    assert streams.log[0] == ("record_event", "caller")
    assert streams.log[1] == ("wait_event", "ours")
    assert ("wait_event", "caller") in streams.log
