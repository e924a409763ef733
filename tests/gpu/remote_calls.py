"""Measure remote calls with tensors on a device, which the receiver reads where they lie, and through host memory.

    torchrun --nproc-per-node=2 tests/gpu/remote_calls.py --device cuda

Started by `prove.py`. Rank 0 calls rank 1; both use the same device if there is only one. Rank 0 prints one line of JSON
with medians in microseconds, and exits with 1 if a tensor arrives wrong.
"""

import argparse
import asyncio
import json
import os
import sys
from statistics import median
from time import perf_counter
from typing import Any

import torch

import asyncdist
from asyncdist import rpc
from asyncdist.config import Config
from asyncdist.store import StoreServer

TRANSPORTS = {"lent": "auto", "host": "cpu:auto,cuda:staged"}
"""ASYNCDIST_TRANSPORT of a session whose tensors are lent where that is possible, and of one that lends none."""


class Keeper:
    """Takes tensors, and has one of each size."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[int, torch.Tensor] = {}

    async def take(self, tensor: torch.Tensor) -> list[float]:
        return [float(tensor[0]), float(tensor[-1])]

    async def get(self, count: int) -> torch.Tensor:
        if count not in self._kept:
            self._kept[count] = torch.full((count,), 5.0, device=self._device)
        return self._kept[count]


async def is_lent(keeper: rpc.RemoteObject, device: torch.device) -> bool:
    """Call until each process has learned whether the other one maps its memory; return whether this one lends."""
    if device.type == "cpu":
        return False
    tensor = torch.ones(100_000, device=device)
    for _ in range(100):
        await asyncio.gather(keeper.take(tensor), keeper.get(100_000))
        if keeper._caller.loans.lends(tensor):
            return True
        await asyncio.sleep(0.05)
    return False


async def microseconds(keeper: rpc.RemoteObject, count: int, device: torch.device) -> tuple[float, float]:
    """Return the time of a call with a tensor as argument, and of one with such a result."""
    sent = torch.full((count,), 3.0, device=device)
    start = perf_counter()
    ends = await keeper.take(sent)
    between = perf_counter()
    found = await keeper.get(count)
    end = perf_counter()
    if ends != [3.0, 3.0] or found.device != sent.device or not bool((found == 5).all()):
        sys.exit(f"a tensor of {count} elements has arrived wrong: {ends}, {found.device}, {found[:1].tolist()}")
    return (between - start) * 1e6, (end - between) * 1e6


async def measure(job: str, device: torch.device, sizes: list[int], rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    async with (
        rpc.connect(job, config=Config(transport=TRANSPORTS["lent"])) as lending,
        rpc.connect(job, config=Config(transport=TRANSPORTS["host"])) as by_host,
    ):
        keepers = {"lent": await lending.find("lent"), "host": await by_host.find("host")}
        figures["lent"] = await is_lent(keepers["lent"], device)
        for nbytes in sizes:
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in keepers}
            for number in range(rounds + 1):
                for name, keeper in keepers.items():
                    times = await microseconds(keeper, nbytes // 4, device)
                    # The first round allocates memory.
                    taken[name] += [times] if number else []
            for name, times in taken.items():
                figures[f"argument, {nbytes} bytes, {name}"] = round(median(each[0] for each in times), 1)
                figures[f"result, {nbytes} bytes, {name}"] = round(median(each[1] for each in times), 1)
    return figures


async def main(device: torch.device, sizes: list[int], rounds: int) -> dict[str, Any] | None:
    async with asyncdist.process_group() as group:
        if group.rank() == 0:
            server = await StoreServer.start("127.0.0.1", 0)
            try:
                job = f"asyncdist://127.0.0.1:{server.port}/calls"
                await group.broadcast_object_list([job], 0)
                figures = await measure(job, device, sizes, rounds)
                await group.barrier()
            finally:
                await server.close()
            return figures
        received = [None]
        await group.broadcast_object_list(received, 0)
        job = str(received[0])
        async with (
            rpc.serve({"lent": Keeper(device)}, job, config=Config(transport=TRANSPORTS["lent"])),
            rpc.serve({"host": Keeper(device)}, job, config=Config(transport=TRANSPORTS["host"])),
        ):
            await group.barrier()
        return None


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments.add_argument("--sizes", type=int, nargs="+", default=[128 << 10, 1 << 20, 16 << 20, 256 << 20])
    arguments.add_argument("--rounds", type=int, default=20)
    options = arguments.parse_args()
    chosen = torch.device(options.device)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(chosen)
    found = asyncio.run(main(chosen, options.sizes, options.rounds))
    if found is not None:
        print(json.dumps(found), flush=True)
