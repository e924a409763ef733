"""The NCCL backend over a pretended NCCL, which moves the bytes and checks NCCL's rules. Ranks are threads.

tests/gpu runs the same on real devices.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import gc
import itertools
import threading
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncdist import sync
from asyncdist.base.ops import ReduceOp, premul_sum
from asyncdist.config import NcclSettings
from asyncdist.devices.group import DeviceGroup
from asyncdist.errors import (
    AsyncdistError,
    GroupAbortedError,
    OperationTimeoutError,
    TransportUnavailableError,
    UnsupportedError,
)
from asyncdist.groups.group import Group
from asyncdist.store import HashStore
from asyncdist.testing.arithmetic import UNREDUCED, reductions
from asyncdist.testing.cluster import run_ranks
from asyncdist.testing.collective_cases import collective_cases, moving, reducing
from asyncdist.transport.device_streams import cuda_missing
from asyncdist_transports.nccl import Nccl, bindings, collectives, communicator
from asyncdist_transports.nccl.bindings import Bindings, Numbers, numbers_of
from tests.support.devices import PretendStreams, device_group
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
        self.kept = set()

    def record_stream(self, tensor):
        super().record_stream(tensor)
        self.kept.add(tensor.data_ptr())

    @property
    def handle(self):
        return STREAM + self.rank


@pytest.fixture
def run(until):
    """Run ``program(device)`` on the device of each rank, and check how every communicator ends."""

    def run(size, program, *, nccl=None, streams=None, ends=("destroyed",), transport="inproc", after=lambda: None):
        nccl = nccl or PretendNccl()
        devices = streams or [RanksStreams(rank) for rank in range(size)]
        kinds = [nccl_over(nccl)]

        # A rank that leaves early is lost to the others.
        ended = threading.Barrier(size)

        def rank(group):
            device = device_group(group, kinds, devices[group.rank()])
            device.world = group.world
            try:
                result = program(device)
                with contextlib.suppress(threading.BrokenBarrierError):
                    ended.wait(20)
                return result
            except BaseException:
                ended.abort()
                raise
            finally:
                device.close()

        try:
            return run_ranks(size, rank, transport=transport)
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


def run_cases(made, run, size, **how):
    """Run collective cases, one after the other on every rank, and check them."""
    todo = [drill for drill in made if drill.name != "monitored_barrier"]

    def program(group):
        for drill in todo:
            for work in drill.start(group):
                work.wait()
        return group.backend

    assert set(run(size, program, **how)) == {"nccl"}
    for drill in todo:
        drill.check()


# -- collectives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective(size, run):
    run_cases([drill for count in (0, 1, 300) for drill in collective_cases(size, count, torch.float32)], run, size)


@pytest.mark.parametrize("dtype", [*REDUCED, *sorted(UNREDUCED, key=str)], ids=str)
def test_data_movement_of_every_dtype(dtype, run):
    run_cases(moving(3, 77, dtype), run, 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_every_reduction(dtype, size, run):
    run_cases([drill for op in reductions(dtype) for drill in reducing(size, 50, dtype, op)], run, size)


def test_gathered_reductions_are_split_to_fit_the_scratch_memory(run, monkeypatch):
    monkeypatch.setattr(collectives, "_SCRATCH_NBYTES", 3 * 2 * 16)
    for count in (1, 15, 16, 17, 100):
        run_cases(reducing(3, count, torch.int16, ReduceOp.BXOR), run, 3)


def test_background_and_blocking_calls_in_flight(run):
    todo = [d for count in (1, 300) for d in collective_cases(3, count, torch.float32) if d.name != "monitored_barrier"]

    def program(group):
        works = [
            work for n, drill in enumerate(todo) for work in drill.start(group, background=(n + group.rank()) % 3 != 0)
        ]
        for work in works:
            work.wait()

    run(3, program)
    for drill in todo:
        drill.check()


@pytest.mark.parametrize("joined", [0, 1, 2])
def test_ranks_make_equal_calls_when_only_some_have_contiguous_lists(joined, run):

    def program(group):
        rank, size = group.rank(), group.size()

        def room():
            return list(torch.zeros(size * 4).split(4)) if rank <= joined else [torch.zeros(4) for _ in range(size)]

        gathered, inputs, own = room(), room(), torch.zeros(4)
        group.all_gather(gathered, torch.full((4,), float(rank))).wait()
        for place, tensor in enumerate(inputs):
            tensor.fill_(10 * rank + place)
        group.reduce_scatter(own, inputs).wait()
        return [tensor[0].item() for tensor in gathered], own.tolist()

    for rank, (gathered, own) in enumerate(run(3, program)):
        assert gathered == [0, 1, 2]
        assert own == [10 * (0 + 1 + 2) + 3 * rank] * 4


def test_in_place_all_gather_and_reduce_scatter(run):
    def program(group):
        rank, size = group.rank(), group.size()
        whole = torch.arange(size * 3.0) * (rank + 1)
        group.reduce_scatter_single(whole[3 * rank : 3 * rank + 3], whole).wait()
        group.all_gather_single(whole, whole[3 * rank : 3 * rank + 3]).wait()
        return whole.tolist()

    assert run(3, program) == [[6.0 * number for number in range(9)]] * 3


# -- the calls of NCCL --------------------------------------------------------------------------------


def nccl_calls(run, size, call, rank=0):
    """Return the NCCL calls of one rank for a call: names, and arguments except buffers and stream."""
    nccl = PretendNccl()
    run(size, lambda group: call(group).wait(), nccl=nccl)
    log = next(made.log for made in nccl.communicators if made.rank == rank)
    first, *calls = log
    assert (first[0], first[3:6]) == ("allReduce", (1, 1, 0)), "the check of a new communicator"
    return [(name, *rest[1 if name in ("send", "recv") else 2 : -1]) for name, *rest in calls]


def listed(group, count):
    return [torch.zeros(count) for _ in range(group.size())]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda g: g.all_reduce(torch.ones(5)), [("allReduce", 5, 7, 0)]),
        (lambda g: g.all_reduce(torch.ones(5), ReduceOp.AVG), [("allReduce", 5, 7, 0)]),
        (lambda g: g.all_reduce(torch.ones(5, dtype=torch.complex128)), [("allReduce", 10, 8, 0)]),
        (lambda g: g.all_reduce(torch.ones(5, dtype=torch.bool)), [("allGather", 5, 1)]),
        (lambda g: g.all_reduce(torch.ones(5), premul_sum(2.0)), [("allReduce", 5, 7, 0)]),
        (lambda g: g.all_reduce_coalesced([torch.ones(2), torch.ones(0), torch.ones(3)], ReduceOp.MAX),
         [("allReduce", 2, 7, 2), ("allReduce", 3, 7, 2)]),
        (lambda g: g.reduce(torch.ones(5, dtype=torch.bfloat16), 1, ReduceOp.MIN), [("reduce", 5, 9, 3, 1)]),
        (lambda g: g.reduce(torch.ones(5, dtype=torch.int16), 0), [("recv", 10, 1, 1), ("recv", 10, 1, 2)]),
        (lambda g: g.reduce(torch.ones(5, dtype=torch.int16), 1), [("send", 10, 1, 1)]),
        (lambda g: g.reduce_scatter(torch.ones(4), [torch.ones(4)] * 3), [("reduceScatter", 4, 7, 0)]),
        (lambda g: g.reduce_scatter(torch.ones(4 + g.rank()), [torch.ones(4 + r) for r in range(3)]),
         [("reduce", 4, 7, 0, 0), ("reduce", 5, 7, 0, 1), ("reduce", 6, 7, 0, 2)]),
        (lambda g: g.broadcast(torch.ones(5), 2), [("broadcast", 20, 1, 2)]),
        (lambda g: g.broadcast(torch.ones(0), 2), []),
        (lambda g: g.all_gather(listed(g, 5), torch.ones(5)), [("allGather", 20, 1)]),
        (lambda g: g.all_gather([torch.ones(r) for r in range(3)], torch.ones(g.rank())),
         [("broadcast", 4, 1, 1), ("broadcast", 8, 1, 2)]),
        (lambda g: g.gather(torch.ones(5), listed(g, 5) if g.rank() == 0 else None, 0),
         [("recv", 20, 1, 1), ("recv", 20, 1, 2)]),
        (lambda g: g.scatter(torch.ones(5), listed(g, 5) if g.rank() == 1 else None, 1), [("recv", 20, 1, 1)]),
        (lambda g: g.all_to_all(listed(g, 5), listed(g, 5)),
         [("send", 20, 1, 1), ("send", 20, 1, 2), ("recv", 20, 1, 1), ("recv", 20, 1, 2)]),
        (lambda g: g.barrier(), [("allReduce", 1, 1, 0)]),
    ],
)  # fmt: skip
def test_nccl_calls_of_rank_0_of_3(call, expected, run):
    assert nccl_calls(run, 3, call) == expected


@pytest.mark.parametrize(
    ("op", "dtype", "size", "expected"),
    [
        (ReduceOp.SUM, torch.float32, 3, Numbers(7, 1, 0, False)),
        (ReduceOp.PRODUCT, torch.uint64, 3, Numbers(5, 1, 1, False)),
        (ReduceOp.MAX, torch.float16, 3, Numbers(6, 1, 2, False)),
        (ReduceOp.MIN, torch.uint8, 3, Numbers(1, 1, 3, False)),
        (ReduceOp.AVG, torch.float32, 8, Numbers(7, 1, 4, False)),
        (ReduceOp.AVG, torch.float32, 6, Numbers(7, 1, 0, True)),
        (ReduceOp.AVG, torch.bfloat16, 1, Numbers(9, 1, 4, False)),
        (ReduceOp.SUM, torch.complex32, 3, Numbers(6, 2, 0, False)),
        (ReduceOp.AVG, torch.complex64, 3, Numbers(7, 2, 0, True)),
        (ReduceOp.AVG, torch.complex64, 4, Numbers(7, 2, 4, False)),
        (ReduceOp.PRODUCT, torch.complex64, 4, None),
        (ReduceOp.BXOR, torch.int32, 4, None),
        (ReduceOp.SUM, torch.bool, 4, None),
        (ReduceOp.SUM, torch.int16, 4, None),
        (ReduceOp.SUM, torch.float8_e4m3fn, 4, None),
    ],
)
def test_numbers_of_types_and_operations(op, dtype, size, expected):
    assert numbers_of(op, dtype, size) == expected


def test_tensors_are_recorded_on_the_communication_stream(run):
    streams = [RanksStreams(rank) for rank in range(3)]

    def program(group):
        rank, size = group.rank(), group.size()
        single, own = torch.ones(4), torch.ones(4)
        lists = [[torch.ones(4) for _ in range(size)] for _ in range(7)]
        group.all_reduce(single).wait()
        group.broadcast(own, 0).wait()
        group.all_gather(lists[0], own).wait()
        group.reduce_scatter(single, lists[1]).wait()
        group.all_to_all(lists[2], lists[3]).wait()
        group.gather(own, lists[4] if rank == 0 else None, 0).wait()
        group.scatter(own, lists[5] if rank == 0 else None, 0).wait()
        mine = [single, own, *itertools.chain(*lists[:4])]
        if rank == 0:
            mine += [*lists[4][1:], *lists[5][1:]]
        return {tensor.data_ptr() for tensor in mine} - streams[rank].kept

    assert run(3, program, streams=streams) == [set()] * 3
    assert all(("record_stream", "caller") not in each.log for each in streams)


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


def test_capabilities():
    capabilities = {"machine": "m", "device": "GPU-pretended", "version": 22907, "splits": True}
    assert nccl_over(PretendNccl())(context_of()).capabilities() == capabilities
    assert not Bindings(PretendNccl(signed=True)).splits, "cupy 13 splits no communicators"
    assert not Bindings(PretendNccl(version=21602)).splits


def test_ranks_that_share_a_device_use_another_backend(run):
    nccl = PretendNccl()

    def program(group):
        tensor = torch.ones(3)
        group.all_reduce(tensor).wait()
        return group.backend, tensor.tolist()

    assert run(2, program, nccl=nccl, streams=[RanksStreams(0), RanksStreams(0)]) == [("staged", [2.0] * 3)] * 2
    assert not nccl.communicators


@pytest.mark.parametrize("signed", [False, True], ids=["cupy-14", "cupy-13"])
def test_unique_ids_of_cupy_13_and_14_reach_all_ranks(signed, run):
    nccl = PretendNccl(signed=signed)
    raw = Bindings(nccl).unique_id()
    assert isinstance(raw, bytes)
    assert len(raw) == 128
    assert raw[0] > 127, "negative in cupy 13"
    assert run(2, lambda group: group.all_reduce(torch.ones(3)).wait() and group.backend, nccl=nccl) == ["nccl"] * 2


@pytest.mark.parametrize("id_of_rank_0", [None, b"short"])
def test_without_a_unique_id_all_ranks_use_another_backend(id_of_rank_0, run):
    nccl = PretendNccl()

    def refuse():
        if id_of_rank_0 is None:
            raise nccl.NcclError(1)
        return id_of_rank_0

    nccl.get_unique_id = refuse
    assert run(2, lambda group: group.all_reduce(torch.ones(3)).wait() and group.backend, nccl=nccl) == ["staged"] * 2
    assert not nccl.communicators


def failing(nccl, rank, before=lambda: None):
    """Make the creation of one rank's communicator fail."""
    plain = nccl.NcclCommunicator.__init__

    def init(self, size, unique_id, its):
        if its == rank:
            before()
            raise nccl.NcclError(1)
        plain(self, size, unique_id, its)

    nccl.NcclCommunicator.__init__ = init


def test_failed_creation_on_one_rank_makes_all_use_another_backend(run, monkeypatch):
    monkeypatch.setattr(collectives, "_INIT_TIMEOUT", 0.3)
    nccl = PretendNccl()
    failing(nccl, 1)

    def program(group):
        group.all_reduce(torch.ones(3)).wait()
        return group.backend

    assert run(3, program, nccl=nccl, ends=("aborted",), after=nccl.hang_up) == ["staged"] * 3


def test_creation_is_limited_by_the_timeout_of_the_call(run):
    nccl, gate = PretendNccl(), threading.Event()
    failing(nccl, 1, gate.wait)

    def program(group):
        with pytest.raises(AsyncdistError) as caught:
            group.all_reduce(torch.ones(3), timeout=0.3, background=False).result()
        return caught.value

    def after():
        nccl.hang_up()
        gate.set()

    errors = run(2, program, nccl=nccl, ends=("aborted",), after=after)
    assert any(isinstance(error, OperationTimeoutError) for error in errors)


# -- subgroups ----------------------------------------------------------------------------------------


def parts_of(group, parts, streams, nccl):
    """Split a device's group as `asyncdist.split_group` does; return this rank's part, None without one."""
    host, device = group.host, group.device
    number = next((number for number, ranks in enumerate(parts) if group.rank() in ranks), -1)
    part = None if number < 0 else group.world.new_group(parts[number], "part")
    host._devices[device] = group
    if part is not None:
        part._devices[device] = DeviceGroup(part, device, [nccl_over(nccl)], streams)
    host.pass_on(part, number)
    return None if part is None else part.on(device)


def sums(parts, streams, nccl):
    """Return a program that splits its group, and returns each part's backend and its sum of the ranks."""

    def program(group):
        rank = group.rank()
        group.all_reduce(torch.ones(3)).wait()
        part = parts_of(group, parts, streams[rank], nccl)
        group.all_reduce(torch.ones(3))
        if part is None:
            group.barrier().wait()
            return None
        tensor = torch.full((5,), float(rank))
        part.all_reduce(tensor).wait()
        out = torch.empty(2 * part.size())
        part.all_gather_single(out, torch.full((2,), float(rank))).wait()
        assert out.tolist() == [float(r) for r in part.ranks for _ in range(2)], "another order of ranks"
        group.barrier().wait()
        way = part.backend
        part.close()
        return way, tensor[0].item()

    return program


@pytest.mark.parametrize("parts", [[[0, 1], [2, 3]], [[3, 1], [0, 2]], [[0, 2, 3]], [[1]]], ids=str)
@pytest.mark.parametrize("signed", [False, True], ids=["cupy-14", "cupy-13"])
def test_subgroups_split_the_communicator(parts, signed, run):
    nccl = PretendNccl(signed=signed)
    streams = [RanksStreams(rank) for rank in range(4)]
    members = sum(map(len, parts))
    asked = []
    plain = nccl.get_unique_id
    nccl.get_unique_id = lambda: asked.append(1) or plain()
    outcomes = run(4, sums(parts, streams, nccl), nccl=nccl, streams=streams)
    for rank, outcome in enumerate(outcomes):
        ranks = next((ranks for ranks in parts if rank in ranks), None)
        assert outcome == (None if ranks is None else ("nccl", float(sum(ranks))))
    assert len(nccl.communicators) == 4 + members
    assert len(asked) == (1 if not signed else 1 + len(parts)), "unique ids"


def test_subgroups_of_an_unused_group_create_their_communicators(run):
    nccl = PretendNccl()
    streams = [RanksStreams(rank) for rank in range(3)]

    def program(group):
        part = parts_of(group, [[0, 2]], streams[group.rank()], nccl)
        if part is None:
            return None
        part.barrier().wait()
        part.close()
        return part.backend

    assert run(3, program, nccl=nccl, streams=streams) == ["nccl", None, "nccl"]
    assert len(nccl.communicators) == 2


def test_refused_call_does_not_count_as_a_use_before_a_split(run):
    nccl = PretendNccl()
    streams = [RanksStreams(rank) for rank in range(2)]

    def program(group):
        rank = group.rank()
        if rank == 0:
            streams[0].captures = True
            with pytest.raises(UnsupportedError):
                group.barrier()
            streams[0].captures = False
        part = parts_of(group, [[0, 1]], streams[rank], nccl)
        part.barrier().wait()
        part.close()
        return part.backend, group.backend

    assert run(2, program, nccl=nccl, streams=streams) == [("nccl", None)] * 2


def test_communicator_of_an_unused_subgroup_ends(run):
    nccl = PretendNccl()
    streams = [RanksStreams(rank) for rank in range(2)]

    def program(group):
        group.barrier().wait()
        part = parts_of(group, [[0, 1]], streams[group.rank()], nccl)
        group.barrier().wait()
        part.close()

    run(2, program, nccl=nccl, streams=streams)
    assert len(nccl.communicators) == 4


def test_failed_split_fails_the_group(run, monkeypatch):
    monkeypatch.setattr(communicator, "_ABORT_TIMEOUT", 0.05)
    nccl = PretendNccl()
    streams = [RanksStreams(rank) for rank in range(2)]
    plain = nccl.NcclCommunicator.commSplit

    def split(self, colour, key):
        if self.rank == 1:
            raise nccl.NcclError(3)
        return plain(self, colour, key)

    nccl.NcclCommunicator.commSplit = split

    def program(group):
        group.barrier().wait()
        part = parts_of(group, [[0, 1]], streams[group.rank()], nccl)
        with pytest.raises(GroupAbortedError, match=r"NCCL failed.*INTERNAL_ERROR"):
            group.barrier().wait()
        part.close()

    run(2, program, nccl=nccl, streams=streams, ends=("aborted",), after=nccl.hang_up)


def test_split_group_splits_the_device_groups(monkeypatch):
    sync.init_process_group(store=HashStore(), rank=0, world_size=1)
    try:
        device, split = torch.device("cpu"), []
        for group in (sync.group.WORLD, None):
            parent = sync.group.WORLD
            parent._devices[device] = carried = DeviceGroup(parent.sibling("device"), device, [], PretendStreams())
            monkeypatch.setattr(carried, "split", lambda part, number: split.append((part, number)))
            monkeypatch.setattr(Group, "on", lambda group, device: (group, device))
            part = sync.split_group(group, [[0]])
            assert part.ranks == (0,)
            assert split.pop() == ((part, device), 0)
    finally:
        sync.destroy_process_group()


# -- failures ----------------------------------------------------------------------------------------


def test_asynchronous_error_reaches_every_rank(run, until):
    nccl = PretendNccl()
    streams = [RanksStreams(rank) for rank in range(3)]

    def program(group):
        rank = group.rank()
        group.all_reduce(torch.ones(3)).wait()
        streams[rank].hold()
        work = group.all_reduce(torch.ones(3))
        if rank == 1:
            next(made for made in nccl.communicators if made.rank == 1).broken = 6
        until(work.is_completed)
        streams[rank].release()
        with pytest.raises(GroupAbortedError) as caught:
            group.all_reduce(torch.ones(3)).wait()
        return work.exception(), caught.value

    outcomes = run(3, program, nccl=nccl, streams=streams, ends=("aborted",))
    for error, later in outcomes:
        for each in (error, later):
            assert isinstance(each, GroupAbortedError)
            assert "NCCL failed" in str(each)
            assert "NCCL_ERROR_REMOTE_ERROR" in str(each)
            assert each.peer == 1


def test_abort_ends_a_blocked_nccl_call(run, until, monkeypatch):
    monkeypatch.setattr(communicator, "_ABORT_TIMEOUT", 0.05)
    nccl = PretendNccl()

    def program(group):
        group.all_reduce(torch.ones(3)).wait()
        if group.rank() == 0:
            # The peer never makes this call.
            with pytest.raises(OperationTimeoutError):
                group.all_reduce(torch.ones(3), timeout=0.3, background=False).result()
        else:
            until(lambda: nccl.communicators and any(made.ended for made in nccl.communicators))
        with pytest.raises(AsyncdistError):
            group.all_reduce(torch.ones(3), timeout=1.0, background=False).result()

    run(2, program, nccl=nccl, ends=("aborted",))


def test_nonblocking_nccl_is_reported(run):
    nccl = PretendNccl()

    def program(group):
        group.all_reduce(torch.ones(3)).wait()
        for made in nccl.communicators:
            if made.rank == group.rank():
                made.background = True
        with pytest.raises(GroupAbortedError, match="its communicators are nonblocking, which cupy does not support"):
            group.all_reduce(torch.ones(3)).wait()

    run(1, program, nccl=nccl, ends=("aborted",))


def test_nccl_group_is_ended_when_a_call_fails(run):
    nccl = PretendNccl()

    def program(group):
        group.all_reduce(torch.ones(3)).wait()
        nccl.communicators[0].ended = "broken"
        with pytest.raises(GroupAbortedError, match="INVALID_ARGUMENT"):
            group.all_reduce_coalesced([torch.ones(2), torch.ones(3)]).wait()
        assert nccl.calls is None

    run(1, program, nccl=nccl, ends=("broken",))


# -- the end ------------------------------------------------------------------------------------------


def test_queued_work_completes_before_the_communicator_is_destroyed(run, until):
    nccl = PretendNccl()
    streams = [RanksStreams(0)]

    def program(group):
        group.all_reduce(torch.ones(3)).wait()
        streams[0].hold()
        group.all_reduce(torch.ones(3)).wait()
        group.close()
        (made,) = nccl.communicators
        assert not made.ended
        streams[0].release()
        until(lambda: made.ended)

    run(1, program, nccl=nccl, streams=streams)


def test_close_does_not_wait_for_a_stuck_device(run, monkeypatch):
    monkeypatch.setattr(communicator, "_CLOSE_TIMEOUT", 0.1)
    streams = [RanksStreams(0)]

    def program(group):
        group.all_reduce(torch.ones(3)).wait()
        streams[0].hold()

    run(1, program, streams=streams, ends=("aborted",))


def test_close_does_not_wait_for_a_failed_device(run):
    streams = [RanksStreams(0)]

    def program(group):
        group.all_reduce(torch.ones(3)).wait()
        streams[0].broken = RuntimeError("CUDA error")

    run(1, program, streams=streams, ends=("aborted",))


def test_exiting_process_aborts_open_communicators(until):
    nccl = PretendNccl()
    made = alone(Bindings(nccl))
    until(made.ready.is_completed)
    communicator.abort_all()
    assert [each.ended for each in nccl.communicators] == ["aborted"]
    with pytest.raises(GroupAbortedError):
        made.enqueue(("allReduce", 1, 1, 1, 1, 0))
    assert made.async_error() is None


def test_dropped_communicator_is_kept_until_it_has_ended(until):
    """The garbage collector must not end it: that may block."""
    nccl = PretendNccl()
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


def cupy(monkeypatch, nccl, warns=False):
    """Replace ``cupy.cuda.nccl``; None stands for an absent cupy."""
    plain = builtins.__import__

    def imported(name, *arguments, **keywords):
        if name != "cupy.cuda":
            return plain(name, *arguments, **keywords)
        if nccl is None:
            raise ImportError("No module named 'cupy'")
        if warns:
            warnings.warn("nccl library could not be loaded", UserWarning, stacklevel=2)
        return SimpleNamespace(nccl=nccl)

    monkeypatch.setattr(builtins, "__import__", imported)


def test_available_with_device_cupy_and_nccl(cuda):
    cupy(cuda, PretendNccl())
    assert Nccl.probe() is None


def test_unavailable_without_a_device():
    bindings.load.cache_clear()
    assert torch.cuda.is_available() or Nccl.probe() == cuda_missing()


def test_unavailable_without_cupy(cuda):
    cupy(cuda, None)
    assert "cupy cannot be imported (No module named 'cupy'): pip install 'asyncdist[cuda12]'" in Nccl.probe()


def test_unavailable_without_the_library(cuda):
    cupy(cuda, SimpleNamespace(available=False), warns=True)
    assert Nccl.probe() == "cupy finds no NCCL: pip install nvidia-nccl-cu12, or -cu13 for CUDA 13"


def test_unavailable_with_any_other_error(cuda):
    cupy(cuda, SimpleNamespace(available=True))
    assert "AttributeError" in Nccl.probe()


@pytest.mark.parametrize(("value", "blocking"), [(None, True), ("1", True), (" 0 ", False), ("", True)])
def test_nonblocking_communicators_are_refused(cuda, value, blocking):
    cupy(cuda, PretendNccl())
    if value is None:
        cuda.delenv("NCCL_COMM_BLOCKING", raising=False)
    else:
        cuda.setenv("NCCL_COMM_BLOCKING", value)
    assert NcclSettings.from_environment().blocking is blocking
    assert Nccl.probe() == (None if blocking else "NCCL_COMM_BLOCKING=0 is set, which cupy does not support: unset it")
    if not blocking:
        with pytest.raises(TransportUnavailableError):
            Nccl(context_of())


def test_import_does_not_import_cupy():
    for module in (bindings, communicator, collectives):
        tree = ast.parse(Path(module.__file__).read_text())
        imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert "cupy" not in " ".join(map(ast.unparse, imports))
