"""The CUDA IPC backend over a pretended driver, which keeps CUDA's rules in host memory.

Ranks are threads, so that mapping another rank's memory only needs its address.
"""

import threading

import pytest
import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.errors import AsyncdistError, GroupError, MismatchError
from asyncdist.kernel.transport.device_p2p import TransferRefused
from asyncdist.kernel.transport.device_streams import cuda_missing
from asyncdist_transports.cuda_ipc import collectives as module
from asyncdist_transports.cuda_ipc.driver import Driver
from asyncdist_transports.cuda_ipc.handles import NOTHING, ExportedMemory, Exports, Imports
from asyncdist_transports.cuda_ipc.loans import CudaIpcLoans
from tests.support.cuda import HANDLE, PretendDriver, cuda_ipc_over
from tests.support.devices import PretendStreams, device_cases, run_cases, run_cases_in_flight, run_on_devices


@pytest.mark.exhaustive
@pytest.mark.parametrize("small", [0, 64 << 10], ids=["all", "large"])
@pytest.mark.parametrize("shareable", [True, False], ids=["exported", "copied"])
@pytest.mark.parametrize("idle", [False, True], ids=["busy", "idle"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective(size, idle, shareable, small, monkeypatch, run):
    monkeypatch.setattr(module, "_SMALL_NBYTES", small)
    monkeypatch.setattr(PretendStreams, "is_idle", lambda self: idle)
    run_cases(run, size, device_cases(size, [1, 300, 40_000], torch.float32), shareable=shareable)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint16, torch.bool, torch.complex64], ids=str)
def test_every_dtype(dtype, monkeypatch, run):
    monkeypatch.setattr(module, "_SMALL_NBYTES", 0)
    run_cases(run, 3, device_cases(3, [300], dtype))


def test_background_and_blocking_calls_in_flight(monkeypatch, run):
    monkeypatch.setattr(module, "_SMALL_NBYTES", 0)
    run_cases_in_flight(run, 3, device_cases(3, [1, 300], torch.float32), transport="shm")


@pytest.mark.parametrize(("count", "maps"), [(64, False), (16_384, False), (16_385, True)])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_small_calls_go_through_the_host(collective, count, maps, run):
    """``count`` is the number of float32 elements of the whole call."""

    def program(device):
        device.barrier().wait()
        before = device.drivers[0].handles
        block, whole = torch.ones(count // 2 + count % 2), torch.ones(2 * (count // 2 + count % 2))
        if collective == "all_reduce":
            device.all_reduce(torch.ones(count)).wait()
        elif collective == "all_gather":
            device.all_gather_single(whole, block).wait()
        else:
            device.reduce_scatter_single(block, whole).wait()
        return device.drivers[0].handles > before

    assert run(2, program) == [maps] * 2


def test_no_rank_waits_for_ever_for_the_device_of_another(run, until):
    passed = threading.Barrier(2)

    def program(device):
        device.barrier().wait()
        # An abort would end the barrier of a rank that has not yet passed it.
        passed.wait(60)
        (driver,) = device.drivers
        if device.rank() == 1:
            driver.holds = True
        work = device.all_reduce(torch.ones(40_000))
        if device.rank() == 1:
            # Rank 0 has everything that it needs from this rank but the event.
            until(driver.held_events)
            device.host.abort("its process was killed")
        with pytest.raises(GroupError, match="its process was killed"):
            work.wait()

    run(2, program)


def test_mismatched_calls_raise(run):
    def program(device):
        tensor = torch.ones(100_000)
        with pytest.raises(GroupError) as caught:
            (device.broadcast(tensor, 0) if device.rank() else device.all_reduce(tensor)).wait()
        return caught.value

    errors = run(2, program)
    assert any(isinstance(error, MismatchError) for error in errors)
    assert all("broadcast" in str(error) and "all_reduce" in str(error) for error in errors)


def test_mismatched_sizes_raise(run):
    def program(device):
        rank = device.rank()
        sent = [torch.ones(50_000) for _ in range(2)]
        came = [torch.empty(50_000 + (rank == 0 and peer == 1)) for peer in range(2)]
        with pytest.raises(GroupError) as caught:
            device.all_to_all(came, sent).wait()
        return str(caught.value)

    zero, one = run(2, program)
    assert "rank 1 sent 200000 bytes where 200004 were expected" in zero
    assert "200004" in one


# -- negotiation ------------------------------------------------------------------------------------


def reduce_large(device):
    device.all_reduce(tensor := torch.ones(100_000)).wait()
    return device.backend, tensor[0].item()


def test_ranks_of_several_hosts_are_staged():
    assert run_on_devices(2, reduce_large, [cuda_ipc_over()], hosts=["a", "b"]) == [("staged", 2.0)] * 2


def test_driver_tells_what_is_missing_without_cuda():
    assert "CUDA" in (Driver.missing() or "CUDA")
    if not torch.cuda.is_available():
        assert Driver.missing() == cuda_missing()
        with pytest.raises(AsyncdistError):
            Driver(torch.device("cuda", 0)).allocation(0)


# -- handles ----------------------------------------------------------------------------------------


def test_handle_is_created_once_per_allocation():
    exports = Exports(driver := PretendDriver())
    tensor = torch.ones(10)
    shown, first = exports.export(tensor, 0)
    assert shown is tensor
    assert exports.export(tensor, 0)[1] == first
    assert driver.handles == 1
    driver.numbers[tensor.data_ptr()] = 2  # freed, and its address reused
    assert exports.export(tensor, 0)[1] != first
    assert driver.handles == 2


def test_empty_tensor_exports_nothing():
    assert Exports(PretendDriver()).export(torch.empty(0), 0)[1] == NOTHING


def test_memory_that_cannot_be_shared_is_copied():
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


def test_mapping_is_kept_until_its_address_is_reused():
    wait_until_idle = []
    imports = Imports(driver := PretendDriver(), lambda: wait_until_idle.append(True))
    tensor = torch.arange(4.0)
    base = tensor.data_ptr()
    handle = HANDLE.pack(base, 1)
    before = ExportedMemory(base, 1, 4, 12, handle)
    assert imports.open(1, before).view(torch.float32).tolist() == [1, 2, 3]
    assert imports.open(1, ExportedMemory(base, 1, 8, 8, handle)).view(torch.float32).tolist() == [2, 3]
    assert (driver.maps, wait_until_idle) == (1, [])
    imports.open(1, ExportedMemory(base, 2, 4, 12, handle))
    assert driver.maps == 2
    assert driver.mapped == {base: 1}
    assert wait_until_idle == [True], "unmapped while the queue may have used it"
    imports.open(0, before)
    assert driver.mapped == {base: 2}, "two ranks may use the same address"
    imports.forget(1)
    imports.forget(7)
    assert driver.mapped == {base: 1}
    assert len(wait_until_idle) == 2
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


def test_event_is_recorded_again_only_after_all_streams_wait_for_it(monkeypatch, run):
    """`TheirEvent` asserts it."""
    monkeypatch.setattr(module, "_SMALL_NBYTES", 0)

    def program(device):
        tensor = torch.ones(1000)
        for _ in range(50):
            device.all_reduce(tensor, ReduceOp.AVG).wait()
        return tensor.sum().item()

    assert run(4, program, transport="shm") == [1000.0] * 4


# -- loans ------------------------------------------------------------------------------------------------


def loans_pair(**borrower):
    """Return the loans of an owner and of a borrower with a pretended device each, and the borrower's driver."""
    drivers = [PretendDriver(), PretendDriver(**borrower)]
    owner, reader = (CudaIpcLoans(PretendStreams(f"GPU-{rank}"), driver) for rank, driver in enumerate(drivers))
    return owner, reader, drivers


def test_lent_tensors_are_copied_when_they_are_ready_and_unmapped_when_their_owner_has_ended():
    owner, reader, drivers = loans_pair()
    reader.verify("owner", owner.probe)
    tensors = [torch.arange(100, dtype=torch.uint8), torch.full((50,), 7, dtype=torch.uint8)]
    drivers[0].holds = True
    loan = owner.lend(tensors, owner.streams.record_event())
    event = reader.ready("owner", loan.locations[0])
    assert event is reader.ready("owner", loan.locations[1]), "one event for the tensors of a loan"
    assert not event.query()
    drivers[0].go_on()
    assert event.query()
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    assert reader.read("owner", loan.locations, targets, reader.streams.record_event()).query()
    assert all(torch.equal(target, tensor) for target, tensor in zip(targets, tensors, strict=True))
    owner.end(loan)
    again = owner.lend(tensors[:1], owner.streams.record_event())
    assert again.held == loan.held, "the event is recorded again"
    reader.forget("owner")
    assert not drivers[1].mapped
    for loans in (owner, reader):
        loans.close()
    assert not any(driver.mapped or driver.taken for driver in drivers)


def test_mapping_that_fails_in_the_middle_of_a_copy_leaves_no_queued_work():
    owner, reader, drivers = loans_pair()
    reader.verify("owner", owner.probe)
    tensors = [torch.arange(100, dtype=torch.uint8) for _ in range(2)]
    loan = owner.lend(tensors, owner.streams.record_event())
    opened = drivers[1].map

    def opens_one(handle):
        address, drivers[1].refuses = opened(handle), RuntimeError("out of mappings")
        return address

    drivers[1].map = opens_one
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    with pytest.raises(TransferRefused, match="cannot be mapped: out of mappings"):
        reader.read("owner", loan.locations, targets, reader.streams.record_event())
    assert reader.streams.asked("ours")[-1] == "record_event", "it waits until its copies are complete"
    reader.close()
    owner.close()


def test_memory_that_cannot_be_mapped_is_not_lent():
    owner, _, drivers = loans_pair()
    drivers[0].shareable = False
    assert not owner.can_lend(torch.ones(4))
    with pytest.raises(TransferRefused, match="cannot be mapped by other processes"):
        owner.lend([torch.ones(4)], owner.streams.record_event())
