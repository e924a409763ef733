"""torch's names for remote calls: a program in the manner of torch's tutorials, and what is different."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from asyncdist.config import Config
from asyncdist.errors import AlreadyInitializedError, NotInitializedError, UnsupportedError, UsageError
from asyncdist.rpc import blocking as rpc
from asyncdist.rpc.errors import CallTimeoutError
from tests.support.ports import free_port

PROGRAM = Path(__file__).parent / "program_torch_names.py"


def output_of(library: str) -> str:
    command = [sys.executable, str(PROGRAM), library, str(free_port())]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.processes
def test_program_of_torch_runs_after_changing_one_import():
    found = output_of("asyncdist")
    assert "rewards {1: [2.0, 4.0, 6.0], 2: [4.0, 8.0, 12.0]}" in found
    assert "weights [tensor([[0.1000, 0.1000]]), tensor([[0.1000, 0.1000]])]" in found


@pytest.mark.processes
@pytest.mark.exhaustive
def test_program_prints_the_same_with_torch():
    assert output_of("torch") == output_of("asyncdist")


@pytest.fixture
def alone():
    """Be the only worker."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}", rpc_timeout=60.0)
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    yield
    rpc.shutdown()


class Counter:
    def __init__(self):
        self.count = 0

    def add(self, number):
        self.count += number
        return self.count


def test_worker_calls_itself(alone):
    assert rpc.rpc_sync("alone", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
    assert rpc.rpc_sync(0, max, args=(1, 2)) == 2
    counter = rpc.remote("alone", Counter)
    assert counter.rpc_sync().add(2) == 2
    assert counter.rpc_async().add(3).wait() == 5
    assert counter.remote().add(1).to_here() == 6
    assert counter.local_value().count == 6
    assert counter.owner() == rpc.get_worker_info() == rpc.get_worker_info("alone")
    assert counter.confirmed_by_owner()
    assert rpc.rpc_sync("alone", same, args=([{"a": (counter,)}],))[0]["a"][0].local_value() is counter.local_value()


def same(value):
    return value


def test_wrong_calls_are_refused(alone):
    with pytest.raises(AlreadyInitializedError):
        rpc.init_rpc("again", rank=0, world_size=1)
    with pytest.raises(UsageError, match="there is no worker 'other'; there are alone"):
        rpc.rpc_sync("other", max, args=(1, 2))
    with pytest.raises(UnsupportedError, match=r"train with asyncdist\.rpc\.RemoteModule"):
        rpc.RRef(1).backward()
    with pytest.raises(UsageError, match="an RRef inside another object"):
        rpc.rpc_sync("alone", same, args=(Holder(rpc.RRef(1)),))


class Holder:
    def __init__(self, value):
        self.value = value


def test_timeout_of_a_call_passes(alone):
    with pytest.raises(CallTimeoutError):
        rpc.rpc_sync("alone", wait_until_told, timeout=0.05)
    told.set()


told = threading.Event()


def wait_until_told():
    told.wait(60)


def test_calls_need_an_agent():
    with pytest.raises(NotInitializedError, match="no RPC agent: call init_rpc"):
        rpc.rpc_sync("worker", max, args=(1, 2))
    rpc.shutdown()
    assert rpc.is_available()
    assert not Config().allow_pickle
