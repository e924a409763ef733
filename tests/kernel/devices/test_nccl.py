"""The NCCL backend over a pretended NCCL, which moves the bytes and checks NCCL's rules. Ranks are threads.

tests/gpu tests the real NCCL.
"""

import contextlib
import functools
import gc
import itertools
import re
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from asyncdist import sync
from asyncdist.base.ops import ReduceOp
from asyncdist.environment import NcclSettings
from asyncdist.errors import (
    AsyncdistError,
    GroupAbortedError,
    OperationTimeoutError,
    TransportUnavailableError,
    UnsupportedError,
)
from asyncdist.groups.group import Group
from asyncdist.kernel.devices.group import DeviceGroup
from asyncdist.kernel.transport.device_streams import cuda_missing
from asyncdist.store import HashStore
from asyncdist.testing.arithmetic import reductions
from asyncdist.testing.collective_cases import reducing
from asyncdist_transports.nccl import Nccl, bindings, collectives, communicator
from asyncdist_transports.nccl.bindings import Bindings
from tests.support.devices import PretendStreams, device_cases, part_on, run_cases, run_cases_in_flight, run_on_devices
from tests.support.nccl import PretendNccl, nccl_over

REDUCED = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
STREAM = 0x5EED

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


class RanksStreams(PretendStreams):
    """The device of one rank, which records the tensors of `record_stream`."""

    def __init__(self, rank):
        super().__init__(f"GPU-{rank}")
        self.rank = rank
        self.recorded = set()

    def record_stream(self, tensor):
        super().record_stream(tensor)
        self.recorded.add(tensor.data_ptr())

    @property
    def handle(self):
        return STREAM + self.rank


@pytest.fixture
def nccl(request):
    """The pretended NCCL of the ranks; a test may set its options."""
    return PretendNccl(**getattr(request, "param", {}))


EACH_CUPY = pytest.mark.parametrize("nccl", [{}, {"signed": True}], ids=["cupy-14", "cupy-13"], indirect=True)


@pytest.fixture
def run(nccl, until):
    """Run ``program(device)`` on the device of each rank, and check how every communicator ends.

    The device has the ``world`` of the rank and the ``streams`` of the device.
    """

    def run(size, program, *, ends=("destroyed",), after=lambda: None):
        streams = [RanksStreams(rank) for rank in range(size)]
        # A rank that leaves early is lost to the others.
        ended = threading.Barrier(size)

        def with_streams(device):
            device.world, device.streams = device.host.world, streams[device.rank()]
            try:
                result = program(device)
                with contextlib.suppress(threading.BrokenBarrierError):
                    ended.wait(60)
                return result
            except BaseException:
                ended.abort()
                raise

        try:
            return run_on_devices(size, with_streams, [nccl_over(nccl)], streams)
        finally:
            after()
            until(lambda: all(made.ended for made in nccl.communicators))
            assert {made.ended for made in nccl.communicators} <= set(ends)
            assert not nccl.collected
            for made in nccl.communicators:
                if made.size == size:
                    assert {call[-1] for call in made.log} <= {STREAM + made.rank}, "on another stream"
                if made.ended == "destroyed":
                    assert not any(made.meeting.messages.values()), "sent, and never received"

    return run


# -- collectives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_every_collective(size, run):
    assert set(run_cases(run, size, device_cases(size, [0, 1, 300], torch.float32))) == {"nccl"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_every_reduction(dtype, size, run):
    run_cases(run, size, [case for op in reductions(dtype) for case in reducing(size, 50, dtype, op)])


def test_gathered_reductions_are_split_to_fit_the_scratch_memory(run, monkeypatch):
    monkeypatch.setattr(collectives, "_SCRATCH_NBYTES", 3 * 2 * 16)
    run_cases(run, 3, [case for count in (1, 16, 17, 50) for case in reducing(3, count, torch.int16, ReduceOp.BXOR)])


def test_background_and_blocking_calls_in_flight(run):
    run_cases_in_flight(run, 3, device_cases(3, [1, 300], torch.float32))


@pytest.mark.parametrize("last", [0, 1])
def test_ranks_make_equal_calls_when_only_some_have_contiguous_lists(last, run):
    """The lists of ranks 0 to ``last`` are contiguous."""

    def program(device):
        rank, size = device.rank(), device.size()

        def blocks():
            return list(torch.zeros(size * 4).split(4)) if rank <= last else [torch.zeros(4) for _ in range(size)]

        gathered, inputs, own = blocks(), blocks(), torch.zeros(4)
        device.all_gather(gathered, torch.full((4,), float(rank))).wait()
        for place, tensor in enumerate(inputs):
            tensor.fill_(10 * rank + place)
        device.reduce_scatter(own, inputs).wait()
        return [tensor[0].item() for tensor in gathered], own.tolist()

    for rank, (gathered, own) in enumerate(run(3, program)):
        assert gathered == [0, 1, 2]
        assert own == [10 * (0 + 1 + 2) + 3 * rank] * 4


def test_in_place_all_gather_and_reduce_scatter(run):
    def program(device):
        rank, size = device.rank(), device.size()
        whole = torch.arange(size * 3.0) * (rank + 1)
        device.reduce_scatter_single(whole[3 * rank : 3 * rank + 3], whole).wait()
        device.all_gather_single(whole, whole[3 * rank : 3 * rank + 3]).wait()
        return whole.tolist()

    assert run(3, program) == [[6.0 * number for number in range(9)]] * 3


def test_tensors_are_recorded_on_the_communication_stream(run):
    def program(device):
        rank, size = device.rank(), device.size()
        single, own = torch.ones(4), torch.ones(4)
        lists = [[torch.ones(4) for _ in range(size)] for _ in range(6)]
        device.all_reduce(single).wait()
        device.broadcast(own, 0).wait()
        device.all_gather(lists[0], own).wait()
        device.reduce_scatter(single, lists[1]).wait()
        device.all_to_all(lists[2], lists[3]).wait()
        device.gather(own, lists[4] if rank == 0 else None, 0).wait()
        device.scatter(own, lists[5] if rank == 0 else None, 0).wait()
        used = [single, own, *itertools.chain(*lists[: 6 if rank == 0 else 4])]
        assert ("record_stream", "caller") not in device.streams.log
        return {tensor.data_ptr() for tensor in used} - device.streams.recorded

    assert run(3, program) == [set()] * 3


# -- negotiation --------------------------------------------------------------------------------------


def context_of(size=2):
    """Return a context for methods that do not communicate."""
    return SimpleNamespace(rank=0, size=size, streams=PretendStreams(), host=SimpleNamespace(error=None), machine="m")


def capabilities(device="a", machine="m", version=22907):
    return {"machine": machine, "device": device, "version": version}


@pytest.mark.parametrize(
    ("all_capabilities", "reason"),
    [
        ([capabilities("a"), capabilities("b")], None),
        ([capabilities("a"), capabilities("a", machine="n")], None),
        ([capabilities("a"), capabilities("b"), capabilities("b")],
         "ranks 1 and 2 share one device, and NCCL needs a device per rank"),
        ([capabilities("a"), capabilities("b", version=22704)],
         "NCCL is 2.29.7 on rank 0, but 2.27.4 on rank 1: install the same version for every rank"),
        ([capabilities()], None),
    ],
)  # fmt: skip
def test_refusals(all_capabilities, reason):
    assert nccl_over(PretendNccl())(context_of(len(all_capabilities))).refusal(all_capabilities) == reason


def test_old_versions_split_no_communicators():
    assert Bindings(PretendNccl()).splits
    assert not Bindings(PretendNccl(version=21602)).splits
    assert not Bindings(PretendNccl(signed=True)).splits, "cupy 13"


def backend_of_all_reduce(device):
    device.all_reduce(tensor := torch.ones(3)).wait()
    assert tensor.tolist() == [float(device.size())] * 3
    return device.backend


@EACH_CUPY
def test_unique_ids_of_cupy_13_and_14_reach_all_ranks(nccl, run):
    unique_id = Bindings(nccl).unique_id()
    assert isinstance(unique_id, bytes)
    assert len(unique_id) == 128
    assert unique_id[0] > 127, "negative in cupy 13"
    assert run(2, backend_of_all_reduce) == ["nccl"] * 2


@pytest.mark.parametrize("id_of_rank_0", [None, b"short"])
def test_without_a_unique_id_all_ranks_use_another_backend(id_of_rank_0, nccl, run):
    def refuse():
        if id_of_rank_0 is None:
            raise nccl.NcclError(1)
        return id_of_rank_0

    nccl.get_unique_id = refuse
    assert run(2, backend_of_all_reduce) == ["staged"] * 2
    assert not nccl.communicators


def test_failed_creation_on_one_rank_makes_all_use_another_backend(nccl, run, monkeypatch):
    monkeypatch.setattr(collectives, "_INIT_TIMEOUT", 0.3)
    nccl.fail_creation(1)
    assert run(3, backend_of_all_reduce, ends=("aborted",), after=nccl.hang_up) == ["staged"] * 3


def test_creation_is_limited_by_the_timeout_of_the_call(nccl, run):
    gate = threading.Event()
    nccl.fail_creation(1, after=gate.wait)

    def program(device):
        with pytest.raises(AsyncdistError) as caught:
            device.all_reduce(torch.ones(3), timeout=0.3, background=False).result()
        return caught.value

    def after():
        nccl.hang_up()
        gate.set()

    errors = run(2, program, ends=("aborted",), after=after)
    assert any(isinstance(error, OperationTimeoutError) for error in errors)


# -- subgroups ----------------------------------------------------------------------------------------


@pytest.fixture
def part_of(nccl):
    """Split a device group as `asyncdist.split_group` does; return this rank's part, None without one."""

    def part_of(whole, parts):
        number = next((number for number, ranks in enumerate(parts) if whole.rank() in ranks), -1)
        host = None if number < 0 else whole.world.new_group(parts[number], "part")
        part = None if host is None else DeviceGroup(host, whole.device, [nccl_over(nccl)], whole.streams)
        whole.split(part, number)
        return part

    return part_of


@pytest.mark.parametrize("parts", [[[0, 1], [2, 3]], [[3, 1], [0, 2]], [[0, 2, 3]], [[1]]], ids=str)
@EACH_CUPY
def test_subgroups_split_the_communicator(parts, nccl, run, part_of):
    def program(device):
        rank = device.rank()
        device.all_reduce(torch.ones(3)).wait()
        part = part_of(device, parts)
        device.all_reduce(torch.ones(3))
        found = None
        if part is not None:
            out = torch.empty(2 * part.size())
            part.all_gather_single(out, torch.full((2,), float(rank))).wait()
            assert out.tolist() == [float(r) for r in part.ranks for _ in range(2)], "another order of ranks"
            found = part.backend, part.ranks
        device.barrier().wait()
        if part is not None:
            part.close()
        return found

    for rank, found in enumerate(run(4, program)):
        ranks = next((tuple(ranks) for ranks in parts if rank in ranks), None)
        assert found == (None if ranks is None else ("nccl", ranks))
    assert len(nccl.communicators) == 4 + sum(map(len, parts))
    assert nccl.num_unique_ids == (1 + len(parts) if nccl.signed else 1)


def test_subgroups_of_an_unused_group_create_their_communicators(nccl, run, part_of):
    def program(device):
        part = part_of(device, [[0, 2]])
        if part is None:
            return None
        part.barrier().wait()
        part.close()
        return part.backend

    assert run(3, program) == ["nccl", None, "nccl"]
    assert len(nccl.communicators) == 2


def test_refused_call_does_not_count_as_a_use_before_a_split(run, part_of):
    def program(device):
        if device.rank() == 0:
            device.streams.captures = True
            with pytest.raises(UnsupportedError):
                device.barrier()
            device.streams.captures = False
        part = part_of(device, [[0, 1]])
        part.barrier().wait()
        part.close()
        return part.backend, device.backend

    assert run(2, program) == [("nccl", None)] * 2


def test_communicator_of_an_unused_subgroup_ends(nccl, run, part_of):
    def program(device):
        device.barrier().wait()
        part = part_of(device, [[0, 1]])
        device.barrier().wait()
        part.close()

    run(2, program)
    assert len(nccl.communicators) == 4


def test_failed_split_fails_the_group(nccl, run, part_of, monkeypatch):
    monkeypatch.setattr(communicator, "_ABORT_TIMEOUT", 0.05)
    plain = nccl.NcclCommunicator.commSplit

    def split(self, colour, key):
        if self.rank == 1:
            raise nccl.NcclError(3)
        return plain(self, colour, key)

    nccl.NcclCommunicator.commSplit = split
    both = threading.Barrier(2)

    def program(device):
        device.barrier().wait()
        # The notice that rank 1 has failed may arrive before the last message of its barrier.
        both.wait()
        part = part_of(device, [[0, 1]])
        with pytest.raises(GroupAbortedError, match=r"NCCL failed.*INTERNAL_ERROR"):
            device.barrier().wait()
        part.close()

    run(2, program, ends=("aborted",), after=nccl.hang_up)


def test_split_group_splits_the_device_groups(monkeypatch):
    monkeypatch.setattr("asyncdist.kernel.devices.group.CudaStreams", lambda device: PretendStreams())
    device, split = torch.device("cpu"), []
    sync.init_process_group(store=HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(part_on(sync.group.WORLD, device), "split", lambda part, number: split.append((part, number)))
    monkeypatch.setattr(Group, "_on", lambda group, device: (group, device))
    for group in (sync.group.WORLD, None):
        part = sync.split_group(group, [[0]])
        assert (part.ranks, split.pop()) == ((0,), ((part, device), 0))
    sync.destroy_process_group()


# -- failures ----------------------------------------------------------------------------------------


def test_asynchronous_error_reaches_every_rank(nccl, run, until, monkeypatch):
    monkeypatch.setattr("asyncdist.kernel.devices.group._DRAIN_TIMEOUT", 0.1)

    def program(device):
        device.all_reduce(torch.ones(3)).wait()
        device.streams.hold()
        work = device.all_reduce(torch.ones(3))
        if device.rank() == 1:
            next(made for made in nccl.communicators if made.rank == 1).broken = 6
        until(work.is_completed)
        device.streams.release()
        with pytest.raises(GroupAbortedError) as caught:
            device.all_reduce(torch.ones(3)).wait()
        return work.exception(), caught.value

    for each in itertools.chain(*run(3, program, ends=("aborted",))):
        assert isinstance(each, GroupAbortedError)
        assert "NCCL failed" in str(each)
        assert "NCCL_ERROR_REMOTE_ERROR" in str(each)
        assert each.peer == 1


def test_abort_ends_a_blocked_nccl_call(nccl, run, until, monkeypatch):
    monkeypatch.setattr(communicator, "_ABORT_TIMEOUT", 0.05)

    def program(device):
        device.all_reduce(torch.ones(3)).wait()
        if device.rank() == 0:
            # The peer never makes this call.
            with pytest.raises(OperationTimeoutError):
                device.all_reduce(torch.ones(3), timeout=0.3, background=False).result()
        else:
            until(lambda: nccl.communicators and any(made.ended for made in nccl.communicators))
        with pytest.raises(AsyncdistError):
            device.all_reduce(torch.ones(3), timeout=1.0, background=False).result()

    run(2, program, ends=("aborted",))


def test_nonblocking_nccl_is_reported(nccl, run):
    def program(device):
        device.all_reduce(torch.ones(3)).wait()
        for made in nccl.communicators:
            if made.rank == device.rank():
                made.background = True
        with pytest.raises(GroupAbortedError, match="its communicators are nonblocking, which cupy does not support"):
            device.all_reduce(torch.ones(3)).wait()

    run(1, program, ends=("aborted",))


def test_nccl_group_is_ended_when_a_call_fails(nccl, run):
    def program(device):
        device.all_reduce(torch.ones(3)).wait()
        nccl.communicators[0].ended = "broken"
        with pytest.raises(GroupAbortedError, match="INVALID_ARGUMENT"):
            device.all_reduce_coalesced([torch.ones(2), torch.ones(3)]).wait()
        assert nccl.calls is None

    run(1, program, ends=("broken",))


# -- the end ------------------------------------------------------------------------------------------


def test_queued_work_completes_before_the_communicator_is_destroyed(nccl, run, until):
    def program(device):
        device.all_reduce(torch.ones(3)).wait()
        device.streams.hold()
        device.all_reduce(torch.ones(3)).wait()
        device.close()
        (made,) = nccl.communicators
        assert not made.ended
        device.streams.release()
        until(lambda: made.ended)

    run(1, program)


@pytest.mark.parametrize("failure", ["stuck", "lost"])
def test_close_does_not_wait_for_a_device_that_cannot_complete(failure, run, monkeypatch):
    monkeypatch.setattr(communicator, "_CLOSE_TIMEOUT", 0.1)

    def program(device):
        device.all_reduce(torch.ones(3)).wait()
        if failure == "stuck":
            device.streams.hold()
        else:
            device.streams.broken = RuntimeError("CUDA error")

    run(1, program, ends=("aborted",))


def test_failed_group_aborts_its_communicator_if_it_is_closed_at_once(nccl, run, until, monkeypatch):
    monkeypatch.setattr("asyncdist.kernel.devices.group._DRAIN_TIMEOUT", 0.0)
    proceed = threading.Event()

    def program(device):
        device.all_reduce(torch.ones(3)).wait()
        closing, close = threading.current_thread(), device.desync_detector.close

        def held_close():
            """Stop the watcher's thread when it has set the error and not yet aborted the communicator."""
            assert threading.current_thread() is closing or proceed.wait(60)
            close()

        monkeypatch.setattr(device.desync_detector, "close", held_close)
        device.streams.hold()
        device.all_reduce(torch.ones(3))
        nccl.communicators[0].broken = 6
        until(lambda: device.error is not None)
        device.streams.release()
        device.close()
        until(lambda: nccl.communicators[0].ended)
        proceed.set()

    run(1, program, ends=("aborted",))


def test_exiting_process_aborts_open_communicators(nccl, until):
    made = alone(Bindings(nccl))
    until(made.ready.is_completed)
    communicator.abort_all()
    assert [each.ended for each in nccl.communicators] == ["aborted"]
    with pytest.raises(GroupAbortedError):
        made.enqueue(("allReduce", 1, 1, 1, 1, 0))
    assert made.async_error() is None


def test_dropped_communicator_is_kept_until_it_has_ended(nccl, until):
    """The garbage collector must not end it: that may block."""
    dropped = weakref.ref(alone(Bindings(nccl)))
    gc.collect()
    assert not nccl.collected
    left = dropped()
    until(left.ready.is_completed)
    left.close()
    left.ended.result(60)
    assert nccl.communicators[0].ended == "destroyed"


def alone(made):
    make = functools.partial(made.communicator, 1, made.unique_id(), 0)
    return communicator.Communicator(made, PretendStreams(), make, (), 0)


# -- availability -------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    """Pretend that torch sees a device, and clear the cache."""
    bindings.load.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield monkeypatch
    bindings.load.cache_clear()


def install(monkeypatch, nccl):
    """Let ``from cupy.cuda import nccl`` return ``nccl``; None stands for an absent cupy."""
    modules = {"cupy": None, "cupy.cuda": None}
    if nccl is not None:
        modules = {"cupy": SimpleNamespace(), "cupy.cuda": SimpleNamespace(nccl=nccl)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("nccl", "reason"),
    [
        (PretendNccl(), None),
        (None, r"cupy cannot be imported \(.*\): pip install cupy-cuda12x"),
        (SimpleNamespace(available=False), "cupy finds no NCCL: pip install nvidia-nccl-cu12, or -cu13 for CUDA 13"),
        (SimpleNamespace(available=True), "AttributeError"),
    ],
    ids=["available", "no cupy", "no library", "another error"],
)
def test_probe_says_why_nccl_is_unavailable(nccl, reason, cuda):
    install(cuda, nccl)
    found = Nccl.probe()
    assert found is None if reason is None else re.match(reason, found)


def test_unavailable_without_a_device():
    bindings.load.cache_clear()
    assert torch.cuda.is_available() or Nccl.probe() == cuda_missing()


@pytest.mark.parametrize(("value", "blocking"), [(None, True), ("1", True), (" 0 ", False), ("", True)])
def test_nonblocking_communicators_are_refused(cuda, value, blocking):
    install(cuda, PretendNccl())
    if value is None:
        cuda.delenv("NCCL_COMM_BLOCKING", raising=False)
    else:
        cuda.setenv("NCCL_COMM_BLOCKING", value)
    assert NcclSettings.from_environment().blocking is blocking
    assert Nccl.probe() == (None if blocking else "NCCL_COMM_BLOCKING=0 is set, which cupy does not support: unset it")
    if not blocking:
        with pytest.raises(TransportUnavailableError):
            Nccl(context_of())
