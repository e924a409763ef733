"""NCCL itself, with one rank: it takes one a device. Whether ranks understand one another is in tests/devices."""

from __future__ import annotations

import time

import pytest
import torch

from asyncdist.base.ops import PremulSum
from asyncdist.devices.group import DeviceGroup
from asyncdist.errors import GroupAbortedError
from asyncdist.memory.reduce_kernels import arithmetic
from asyncdist.testing.arithmetic import numbers, reduced, reductions, same
from asyncdist.testing.cluster import run_ranks
from asyncdist_transports.nccl import Nccl, collectives
from asyncdist_transports.nccl.bindings import BYTES, SUM, UNIQUE_ID_NBYTES, load, numbers_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:ComplexHalf support")]

CUDA = "cuda:0"
NAMES = """bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex32 complex64
complex128 float8_e4m3fn float8_e5m2""".split()
DTYPES = [getattr(torch, name) for name in NAMES]


@pytest.fixture(autouse=True)
def _nccl():
    reason = Nccl.probe()
    if reason is not None:
        pytest.skip(f"no test of NCCL: {reason}")


def alone(program):
    """Return what ``program(group)`` returns, for a group of one rank on the device."""

    def rank(group):
        host = group.world.new_group(group.ranks, "one")
        device = DeviceGroup(host, torch.device(CUDA), [Nccl])
        try:
            device.barrier().wait()
            assert device.backend == "nccl"
            return program(device)
        finally:
            device.close()

    (result,) = run_ranks(1, rank)
    return result


def until(true):
    give_up = time.monotonic() + 20
    while not true():
        assert time.monotonic() < give_up, "still not so"
        time.sleep(0.001)


def test_every_operation_gives_what_it_gives_on_the_host(pair):
    ((way, compared),) = pair.run("every_drill", CUDA, "cpu:auto,cuda:nccl", ranks=1)
    assert way == "nccl"
    assert compared > 500


def test_it_is_the_library_that_torch_uses():
    major, minor, patch = torch.cuda.nccl.version()
    assert load().version == 10000 * major + 100 * minor + patch
    first, second = load().unique_id(), load().unique_id()
    assert len(first) == len(second) == UNIQUE_ID_NBYTES
    assert first != second


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_and_operation_is_taken(dtype):
    def program(group):
        for op in reductions(dtype):
            tensor = numbers(1000, dtype, seed=1)
            wanted = reduced([tensor], op)
            ours = tensor.to(CUDA)
            group.all_reduce(ours, op).wait()
            assert same(ours.cpu(), wanted), op

    alone(program)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_the_device_reduces_what_nccl_cannot(dtype, size):
    for op in reductions(dtype):
        if isinstance(op, PremulSum) or numbers_of(arithmetic(op, dtype).op, dtype, size) is not None:
            continue
        inputs = [numbers(1000, dtype, seed=rank) for rank in range(size)]
        out = torch.empty(1000, dtype=dtype, device=CUDA)
        collectives._reduce(arithmetic(op, dtype), [each.to(CUDA) for each in inputs], out)
        assert same(out.cpu(), reduced(inputs, op)), op


def test_two_ranks_of_one_device_are_refused():
    def program(group):
        capabilities = group._backend.capabilities()
        return group._backend.refusal([capabilities, capabilities])

    assert alone(program) == "ranks 0 and 1 share one device, and NCCL takes one rank a device"


def test_a_call_comes_after_what_the_callers_stream_had_to_do():
    def program(group):
        side = torch.cuda.Stream(CUDA)
        for number in range(50):
            with torch.cuda.stream(side):
                torch.cuda._sleep(1_000_000)
                tensor = torch.full((100_000,), float(number), device=CUDA)
                out = torch.empty_like(tensor)
                group.all_gather_single(out, tensor).wait()
                found = out + 1
            assert bool((found.cpu() == number + 1).all())

    alone(program)


def test_a_communicator_is_split():
    if not load().splits:
        pytest.skip("this cupy splits no communicators")

    def program(group):
        group.all_reduce(torch.ones(1000, device=CUDA)).wait()
        part = DeviceGroup(group._host.sibling("part"), torch.device(CUDA), [Nccl])
        group.split(part, 0)
        tensor = torch.full((1000,), 3.0, device=CUDA)
        part.all_reduce(tensor).wait()
        assert part.backend == "nccl"
        assert not part._context.inherited, "it was not taken"
        assert part._backend._made is not group._backend._made
        group.split(None, -1)  # a rank that is in no part
        group.all_reduce(torch.ones(1000, device=CUDA)).synchronize()
        part.all_reduce(tensor).synchronize()
        assert tensor.unique().tolist() == [3.0]
        made = part._backend._made
        part.close()
        until(made.ended.done)
        group.all_reduce(torch.ones(1000, device=CUDA)).synchronize()  # the larger one outlives its part

    alone(program)


@pytest.mark.parametrize("how", ["close", "abort"])
def test_it_ends(how):
    def program(group):
        group.all_reduce(torch.ones(1000, device=CUDA)).wait()
        made = group._backend._made
        assert made.async_error() is None
        getattr(made, how)()
        until(made.ended.done)
        assert made._raw.comm == 0
        with pytest.raises(GroupAbortedError):
            made.enqueue(("allReduce", 0, 0, 0, BYTES, SUM))

    alone(program)


def test_what_nccl_says_becomes_an_error_of_the_group():
    def program(group):
        with pytest.raises(GroupAbortedError, match=r"NCCL failed.*INVALID_ARGUMENT"):
            group._backend._made.enqueue(("broadcast", 0, 0, 1, BYTES, 7))  # there is no rank 7

    alone(program)
