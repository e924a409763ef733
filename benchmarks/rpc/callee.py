"""A process that is called: ``callee WHOSE ADDRESS NUMBER``. The process of `caller` starts it.

WHOSE is "asyncdist", and then ADDRESS is the URL of a job; or "torch", and then it is a port. NUMBER is that of the callee.
The process serves until its parent ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import Any

OBJECTS = 125
"""The objects under the name "many" in each process."""


class Target:
    """An object that is called."""

    async def increment(self, number: int) -> int:
        """Return the next number."""
        return number + 1

    async def count_bytes(self, tensor: Any) -> int:
        """Return the size of a tensor."""
        return int(tensor.nbytes)


def increment(number: int) -> int:
    """Return the next number; torch's RPC calls functions."""
    return number + 1


def count_bytes(tensor: Any) -> int:
    """Return the size of a tensor."""
    return int(tensor.nbytes)


def run_callee(whose: str, address: str, number: str) -> None:
    """Serve one of the two libraries until stdin ends."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if whose == "torch":
        torch_worker(int(address), int(number))
        threading.Event().wait()
        return
    from asyncdist.base.background_loop import new_loop

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(address, int(number), None if whose == "unix" else "callee"))


async def _serve(job: str, number: int, host: str | None) -> None:
    from asyncdist import rpc
    from asyncdist.config import Config

    objects = {"one": Target(), "many": [Target() for _ in range(OBJECTS)]}
    async with rpc.serve(objects, job, rank=number, config=Config(host=host)):
        await asyncio.Event().wait()


def torch_worker(port: int, rank: int) -> Any:
    """Become one of the two workers of torch's RPC, and return its module."""
    import torch.distributed.rpc as torch_rpc

    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    torch_rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    return torch_rpc


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    run_callee(*sys.argv[1:])
