"""The processes of a benchmark of weights. A nursery forks them, and `benchmark` paces them over pipes.

Times are those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import socket
import time
from multiprocessing.connection import Connection

import torch

from asyncdist import weights
from asyncdist.sync import weights as blocking

torch.set_num_threads(1)

_TENSOR_NBYTES = 16 << 20
REQUEST_SECONDS = 2e-3
"""Seconds between two requests of a reader."""
_PIECE_NBYTES = 1 << 20


def state_of(nbytes: int, *, meta: bool = False) -> dict[str, torch.Tensor]:
    """Return bfloat16 tensors of 16 MiB, and a last one with the rest of ``nbytes``."""
    counts = [_TENSOR_NBYTES // 2] * (nbytes // _TENSOR_NBYTES) + [nbytes % _TENSOR_NBYTES // 2]
    made = torch.empty if meta else torch.randn
    return {
        f"layer{number}": made(count, dtype=torch.bfloat16, device="meta" if meta else "cpu")
        for number, count in enumerate(counts)
        if count
    }


def _change(state: dict[str, torch.Tensor], part: float) -> None:
    """Change a part of the values by one or two units in the last place, or all of them."""
    for tensor in state.values():
        bits = tensor.view(torch.int16)
        if part == 1:
            bits += 1
            continue
        positions = torch.randint(len(bits), (int(part * len(bits)),))
        bits[positions] += torch.tensor([-1, 1, 2], dtype=torch.int16)[torch.randint(3, positions.shape)]


def publish(test: Connection, job: str, nbytes: int) -> None:
    """Publish a version, or copy the tensors within this process, whenever the test says so; send (begin, end).

    The order "change" changes a part of the values. Its answer is the processor time of this process so far.
    """
    state = state_of(nbytes)
    copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with blocking.Publisher(state, job=job) as publisher:
        test.send("ready")
        step = 0
        for order, *arguments in iter(test.recv, None):
            if order == "change":
                _change(state, *arguments)
                test.send(time.process_time())
                continue
            begun = time.monotonic()
            if order == "copy":
                for name, tensor in state.items():
                    copies[name].copy_(tensor)
            else:
                step += 1
                publisher.publish(step)
            test.send((begun, time.monotonic()))


def read(test: Connection, job: str, nbytes: int) -> None:
    """Swap each version in and send when that was, while requests are answered; at the end send when they were late."""
    asyncio.run(_read(test, job, nbytes))


async def _read(test: Connection, job: str, nbytes: int) -> None:
    loop = asyncio.get_running_loop()
    requests: list[tuple[float, float]] = []
    async with weights.Subscriber(like=state_of(nbytes, meta=True), job=job) as subscriber:
        test.send("ready")
        serving = None
        while await loop.run_in_executor(None, test.recv) is not None:
            version = await subscriber.next()
            async with subscriber.swap(version):
                pass
            test.send(time.monotonic())
            if serving is None:
                serving = asyncio.create_task(_serve(subscriber, requests))
        if serving is not None:
            serving.cancel()
    test.send(requests)
    test.recv()


async def _serve(subscriber: weights.Subscriber, requests: list[tuple[float, float]]) -> None:
    """Answer a request every `REQUEST_SECONDS`; note when each was due, and how late its answer was."""
    due = time.monotonic()
    while True:
        due = max(due + REQUEST_SECONDS, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        with subscriber.reading() as (model, _):
            float(model["layer0"][:1024].sum())
        requests.append((due, time.monotonic() - due))


def send_plainly(test: Connection, address: str, nbytes: int) -> None:
    """Send bytes over one plain TCP connection whenever the test says so: what the link can do."""
    data = memoryview(bytearray(nbytes))
    with socket.create_server((address, 0)) as listening:
        test.send(listening.getsockname()[1])
        connection, _ = listening.accept()
        with connection:
            while test.recv() is not None:
                begun = time.monotonic()
                connection.sendall(data)
                connection.recv(1)
                test.send((begun, time.monotonic()))


def receive_plainly(test: Connection, address: str, port: int, nbytes: int) -> None:
    """Receive what `send_plainly` sends."""
    memory = memoryview(bytearray(_PIECE_NBYTES))
    with socket.create_connection((address, port)) as connection:
        left = nbytes
        while received := connection.recv_into(memory):
            left -= received
            if left == 0:
                connection.sendall(b".")
                left = nbytes
