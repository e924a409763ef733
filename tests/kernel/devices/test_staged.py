"""The staged backend: every collective on a pretended device, compared with plain arithmetic."""

import asyncio
from dataclasses import replace

import pytest
import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.config import Config
from asyncdist.errors import UsageError
from asyncdist.testing.arithmetic import reductions
from asyncdist.testing.collective_cases import between_two, reducing
from tests.support.devices import device_cases, device_group, devices_of

MOVED = [torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]


async def run_cases(groups, cases):
    for case in cases:
        await asyncio.gather(*(work for group in groups for work in case.start(group)))
        case.check()


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_every_operation_over_every_transport(transport, size):
    async with devices_of(size, transport=transport) as groups:
        await run_cases(groups, device_cases(size, [1000], torch.float32))
        assert {group.backend for group in groups} == {"staged"}


@pytest.mark.parametrize("dtype", MOVED, ids=str)
async def test_every_dtype(dtype):
    async with devices_of(2, transport="shm") as groups:
        await run_cases(groups, device_cases(2, [333], dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.complex64], ids=str)
async def test_every_reduction(dtype):
    async with devices_of(3) as groups:
        for op in reductions(dtype):
            await run_cases(groups, reducing(3, 50, dtype, op))


@pytest.mark.exhaustive
@pytest.mark.parametrize("nbytes", [4, 64, 4096])
async def test_large_tensors_are_pipelined_in_pieces(transport, nbytes):
    # Fewer pieces than are in flight, as many, and many more; the last one is shorter.
    config = replace(Config(), device_piece_nbytes=nbytes)
    async with devices_of(2, transport=transport, config=config) as groups:
        await run_cases(groups, device_cases(2, [0, 1, 17, 257], torch.float32))


async def test_forced_schedules_apply_to_the_host_only():
    async with devices_of(2, transport="shm", config=Config(algorithm="all_reduce=ring,gather=star")) as groups:
        await run_cases(groups, device_cases(2, [100], torch.float32))


async def test_several_calls_in_flight(transport):
    async with devices_of(3, transport=transport) as groups:
        cases = [*device_cases(3, [100], torch.float32), *between_two(3, 7, torch.int64)]
        await asyncio.gather(*(work for case in cases for group in groups for work in case.start(group)))
        for case in cases:
            case.check()


@pytest.mark.parametrize("size", [1, 3])
def test_blocking_and_background_calls_in_turn(together, transport, size):
    cases = device_cases(size, [200], torch.float32)

    def program(group):
        device = device_group(group)
        works = []
        for number, case in enumerate(cases):
            # Only cases with one operation per rank may block: a receive may precede its send.
            is_message = "ring" in case.name or "any" in case.name
            works += case.start(device, background=is_message or (number + group.rank()) % 2 == 0)
        for work in works:
            work.synchronize()
        device.close()

    together(size, program, transport=transport)
    for case in cases:
        case.check()


async def test_strided_and_empty_tensors():
    async with devices_of(2) as groups:
        whole = [torch.arange(12.0).reshape(3, 4) * (group.rank() + 1) for group in groups]
        columns = [tensor.t()[1:3] for tensor in whole]
        expected = torch.arange(12.0).reshape(3, 4).t()[1:3] * 3
        await asyncio.gather(*(group.all_reduce(column) for group, column in zip(groups, columns, strict=True)))
        assert all(torch.equal(column, expected) for column in columns)
        assert torch.equal(whole[0][:, 0], torch.arange(12.0).reshape(3, 4)[:, 0])
        await asyncio.gather(*(group.all_reduce(torch.empty(0)) for group in groups))


async def test_tensor_on_another_device_is_refused():
    async with devices_of(2) as groups:
        elsewhere = torch.empty(4, device="meta")
        for call in (
            lambda: groups[0].all_reduce(elsewhere),
            lambda: groups[0].all_gather([torch.empty(4)] * 2, elsewhere),
            lambda: groups[0].all_to_all([torch.empty(4)] * 2, [torch.empty(4), elsewhere]),
            lambda: groups[0].send(elsewhere, 1),
            lambda: groups[0].recv(elsewhere, 1),
        ):
            with pytest.raises((UsageError, ValueError), match="meta"):
                call()
        await asyncio.gather(*(group.all_reduce(torch.ones(1), ReduceOp.SUM) for group in groups))
