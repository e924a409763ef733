"""The real NCCL with one rank, because it takes one rank per device. tests/kernel/devices has several ranks."""

import time

import pytest
import torch
from torch.cuda import _sleep as keep_busy

from asyncdist.base.ops import PremulSum
from asyncdist.errors import GroupAbortedError
from asyncdist.kernel.devices.group import DeviceGroup
from asyncdist.kernel.memory.reduce_kernels import arithmetic
from asyncdist.testing.arithmetic import numbers, reduced, reductions, same
from asyncdist.testing.cluster import run_ranks
from asyncdist_transports.nccl import Nccl
from asyncdist_transports.nccl.bindings import BYTES, SUM, UNIQUE_ID_NBYTES, load, numbers_of
from asyncdist_transports.nccl.communicator import communicators

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
            # The communicator's own thread ends it, and the next test looks for the one that has not ended.
            until(lambda: all(each.ended.done() for each in communicators.living()))

    (result,) = run_ranks(1, rank)
    return result


def open_communicator():
    """Return the one communicator that has not ended."""
    (found,) = [each for each in communicators.living() if not each.ended.done()]
    return found


def until(true):
    give_up = time.monotonic() + 20
    while not true():
        assert time.monotonic() < give_up, "still not so"
        time.sleep(0.001)


def test_every_operation_equals_the_one_on_the_host(pair):
    ((way, compared),) = pair.run("every_drill", CUDA, "cpu:auto,cuda:nccl", ranks=1)
    assert way == "nccl"
    assert compared > 500


def test_library_is_the_one_that_torch_uses():
    major, minor, patch = torch.cuda.nccl.version()
    assert load().version == 10000 * major + 100 * minor + patch
    first, second = load().unique_id(), load().unique_id()
    assert len(first) == len(second) == UNIQUE_ID_NBYTES
    assert first != second


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_reduction(dtype):
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
def test_reductions_that_nccl_does_not_support(dtype, size):
    for op in reductions(dtype):
        if isinstance(op, PremulSum) or numbers_of(arithmetic(op, dtype).op, dtype, size) is not None:
            continue
        inputs = [numbers(1000, dtype, seed=rank) for rank in range(size)]
        out = torch.empty(1000, dtype=dtype, device=CUDA)
        arithmetic(op, dtype).reduce([each.to(CUDA) for each in inputs], out)
        assert same(out.cpu(), reduced(inputs, op)), op


def test_call_follows_the_callers_stream():
    def program(group):
        side = torch.cuda.Stream(CUDA)
        for number in range(50):
            with torch.cuda.stream(side):
                keep_busy(1_000_000)
                tensor = torch.full((100_000,), float(number), device=CUDA)
                out = torch.empty_like(tensor)
                group.all_gather_single(out, tensor).wait()
                found = (out + 1).cpu()
            assert bool((found == number + 1).all())

    alone(program)


def test_split_communicator():
    if not load().splits:
        pytest.skip("this cupy splits no communicators")

    def program(group):
        group.all_reduce(torch.ones(1000, device=CUDA)).wait()
        before = set(communicators.living())
        part = DeviceGroup(group.host._sibling("part"), torch.device(CUDA), [Nccl])
        group.split(part, 0)
        tensor = torch.full((1000,), 3.0, device=CUDA)
        part.all_reduce(tensor).wait()
        assert part.backend == "nccl"
        (made,) = set(communicators.living()) - before
        group.split(None, -1)
        group.all_reduce(torch.ones(1000, device=CUDA)).synchronize()
        part.all_reduce(tensor).synchronize()
        assert tensor.unique().tolist() == [3.0]
        part.close()
        until(made.ended.done)
        group.all_reduce(torch.ones(1000, device=CUDA)).synchronize()

    alone(program)


@pytest.mark.parametrize("how", ["close", "abort"])
def test_communicator_ends(how):
    def program(group):
        group.all_reduce(torch.ones(1000, device=CUDA)).wait()
        made = open_communicator()
        assert made.async_error() is None
        getattr(made, how)()
        until(made.ended.done)
        assert made._raw.comm == 0
        with pytest.raises(GroupAbortedError):
            made.enqueue(("allReduce", 0, 0, 0, BYTES, SUM))

    alone(program)


def test_nccl_error_becomes_a_group_error():
    def program(group):
        with pytest.raises(GroupAbortedError, match=r"NCCL failed.*INVALID_ARGUMENT"):
            open_communicator().enqueue(("broadcast", 0, 0, 1, BYTES, 7))  # there is no rank 7

    alone(program)
