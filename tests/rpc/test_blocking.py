"""torch's names for remote calls: a program in the manner of torch's tutorials, and what is different."""

import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import nn

from asyncdist.base.deadline import Deadline
from asyncdist.config import Config
from asyncdist.errors import AlreadyInitializedError, NotInitializedError, UnsupportedError, UsageError
from asyncdist.rpc import blocking as rpc
from asyncdist.rpc.blocking import startup
from asyncdist.rpc.errors import CallTimeoutError, RemoteError
from asyncdist.rpc.references import RemoteReference
from tests.support.ports import free_port

PROGRAM = Path(__file__).parent / "program_torch_names.py"


@pytest.fixture
def output_of(run_python):
    def output_of(library):
        status, output = run_python(PROGRAM, library, free_port())
        assert status == 0, output
        return output

    return output_of


@pytest.mark.processes
def test_program_of_torch_runs_after_changing_one_import(output_of):
    found = output_of("asyncdist")
    assert "rewards {1: [2.0, 4.0, 6.0], 2: [4.0, 8.0, 12.0]}" in found
    assert "pipeline [0.0, 4.0, 8.0, 12.0]" in found
    assert "weights [tensor([[0.1000, 0.1000]]), tensor([[0.1000, 0.1000]])]" in found


@pytest.mark.processes
@pytest.mark.exhaustive
def test_program_prints_the_same_with_torch(output_of):
    # Torch also writes warnings and tracebacks.
    torchs, ours = (
        re.findall("^(?:rewards|sum|weights|pipeline|size|then|error|info) .*$", output_of(library), re.MULTILINE)
        for library in ("torch", "asyncdist")
    )
    assert torchs == ours
    assert len(ours) == 8


def begin_alone():
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}", rpc_timeout=60.0)
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)


@pytest.fixture
def alone():
    """Be the only worker."""
    begin_alone()
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
    with pytest.raises(UnsupportedError, match=r"make the module with RemoteModule\(worker, class\)"):
        rpc.RRef(1).backward()
    with pytest.raises(UsageError, match=r"<RRef at alone> cannot be pickled.*: pass it to a function"):
        rpc.rpc_sync("alone", same, args=(Holder(rpc.RRef(1)),))


def test_module_of_a_worker_is_trained_without_distributed_autograd(alone):
    torch.manual_seed(0)
    first = rpc.RemoteModule("alone", nn.Linear, args=(3, 4), kwargs={"bias": False})
    second = rpc.RemoteModule("rank:0/cpu", nn.Linear, (4, 2))
    last = nn.Linear(2, 1)
    local = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2), nn.Linear(2, 1))
    for theirs, own in zip([first, second], local[:2], strict=True):
        own.load_state_dict(theirs.remote_state_dict())
    local[2].load_state_dict(last.state_dict())
    ours = rpc.DistributedOptimizer(torch.optim.SGD, [first, second, last.weight, rpc.RRef(last.bias)], lr=0.1)
    theirs = torch.optim.SGD(local.parameters(), lr=0.1)
    inputs = torch.randn(5, 3)
    for _ in range(3):
        last(second(first.forward_async(inputs).wait())).square().sum().backward()
        assert list(first.gradients()) == ["weight"]
        ours.step()
        local(inputs).square().sum().backward()
        theirs.step()
        theirs.zero_grad()
    assert torch.allclose(second.remote_state_dict()["weight"], local[1].weight)
    assert torch.allclose(last.bias, local[2].bias)
    passed_on = rpc.rpc_sync("alone", same, args=([first],))[0]
    assert torch.equal(passed_on(inputs), first(inputs))
    dropout = rpc.RemoteModule("alone", nn.Dropout, args=(0.9,)).eval()
    assert torch.equal(dropout(inputs), inputs)


def test_module_whose_first_call_fails_can_be_called_again(alone, monkeypatch):
    module = rpc.RemoteModule("alone", nn.Identity)
    call = RemoteReference.call

    async def fail(reference, method, *args, **kwargs):
        raise CallTimeoutError("module", method, "alone", 0.1)

    monkeypatch.setattr(RemoteReference, "call", fail)
    with pytest.raises(CallTimeoutError):
        module(torch.ones(2))
    monkeypatch.setattr(RemoteReference, "call", call)
    assert module(torch.ones(2)).tolist() == [1.0, 1.0]


def test_names_of_distributed_autograd_say_what_takes_their_place(alone):
    module = rpc.RemoteModule("alone", nn.Linear, args=(2, 2))
    with pytest.raises(UnsupportedError, match=r"pass the module to rpc\.DistributedOptimizer"):
        module.remote_parameters()
    with pytest.raises(UnsupportedError, match=r"pass the RemoteModule to rpc\.DistributedOptimizer"):
        module.parameters()
    with pytest.raises(UnsupportedError, match=r"remote_state_dict\(\) copies it"):
        nn.Sequential(module).state_dict()
    with pytest.raises(UnsupportedError, match="a RemoteModule has no RRef"):
        module.get_module_rref()
    with pytest.raises(UsageError, match="takes RemoteModules and parameters, not int"):
        rpc.DistributedOptimizer(torch.optim.SGD, [module, 1])
    with pytest.raises(UnsupportedError, match=r"call loss.backward\(\), then step\(\)"):
        rpc.DistributedOptimizer(torch.optim.SGD, [module], lr=0.1).step(1)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        rpc.DistributedOptimizer(torch.optim.SGD, [module], lr=-1.0)
    with pytest.raises(UsageError, match=r"<RemoteModule at alone> cannot be pickled.*: pass it to a function"):
        rpc.rpc_sync("alone", same, args=(nn.Sequential(module),))


def test_device_map_to_another_device_is_refused():
    options = rpc.TensorPipeRpcBackendOptions(device_maps={"other": {0: 0}, "third": {"cpu": "cpu"}})
    options.set_device_map("other", {0: 1})
    with pytest.raises(UnsupportedError, match="'other' sends tensors of device 0 to device 1"):
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    theirs = torch_rpc.TensorPipeRpcBackendOptions(device_maps={"other": {"cuda:1": "cuda:0", "cpu": "cpu"}})
    theirs.set_device_map("other", {"cuda:0": "cuda:2"})
    with pytest.raises(UnsupportedError, match="device cuda:0 to device cuda:2"):
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=theirs)


@rpc.functions.async_execution
def batched(fails=False):
    future = torch.futures.Future()
    threading.Timer(0, future.set_result, [1]).start()
    if fails:
        return future.then(lambda done: done.value() / 0)
    both = torch.futures.collect_all([future.then(lambda done: done.value() + 1), future])
    return both.then(lambda done: [each.value() for each in done.value()])


@rpc.functions.async_execution
def no_future():
    return 1


def test_futures_that_others_have_made_are_results(alone):
    assert rpc.rpc_sync("alone", batched) == [2, 1]
    assert rpc.remote("alone", batched).to_here() == [2, 1]
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
        rpc.rpc_sync("alone", batched, args=(True,))
    with pytest.raises(TypeError, match=r"returns a torch\.futures\.Future, not int"):
        rpc.rpc_sync("alone", no_future)


def test_any_number_of_callbacks_waits_for_further_calls(alone):
    def add_three(done):
        return rpc.rpc_async("alone", sum, args=([done.value(), 3],)).wait()

    futures = [rpc.rpc_async("alone", sum, args=([number],)).then(add_three) for number in range(100)]
    assert torch.futures.wait_all(futures) == [number + 3 for number in range(100)]


def test_function_that_cannot_be_pickled_is_refused_by_name(alone):
    with pytest.raises(
        UsageError, match=r"alone.+<lambda>.* at .*: an object of type builtins.function cannot be pickled"
    ):
        rpc.rpc_sync("alone", lambda: 1)


class Holder:
    def __init__(self, value):
        self.value = value


def test_errors_name_the_worker_and_the_function(alone):
    counter = rpc.remote("alone", Counter)
    for named, call in (
        (r"max\(\) at rank 0 \(process \d+ on .*TypeError", lambda: rpc.rpc_sync("alone", max, args=(1,))),
        (r"exit\(\) at .*SystemExit", lambda: rpc.rpc_async("alone", sys.exit, args=(3,)).wait()),
        (r"nothing\(\) at .*'Counter' object has no attribute", lambda: counter.rpc_sync().nothing()),
        (r"Counter\(\) at .*TypeError", lambda: rpc.remote("alone", Counter, args=(1,)).to_here()),
        (r"Linear\(\) at .*TypeError", lambda: rpc.RemoteModule("alone", nn.Linear)),
    ):
        with pytest.raises(RemoteError, match=rf"^alone\.{named}"):
            call()
    assert counter.rpc_sync().add(1) == 1


ODD = {each.__name__: each for each in (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt)}


def raise_odd(name):
    raise ODD[name]("odd")


@rpc.functions.async_execution
def odd_later(name):
    future = torch.futures.Future()
    future.set_exception(ODD[name]("odd"))
    return future


@pytest.mark.parametrize(("function", "name"), [*((raise_odd, name) for name in ODD), (odd_later, "StopIteration")])
def test_exception_that_no_future_carries_is_told_at_once(alone, function, name):
    with pytest.raises(RemoteError, match=rf"{function.__name__}\(\) at .* it raised {name}: odd"):
        rpc.rpc_sync("alone", function, args=(name,))
    # The loop that runs the calls goes on.
    assert rpc.rpc_sync("alone", max, args=(1, 2)) == 2


def test_timeout_of_a_call_passes(alone):
    with pytest.raises(CallTimeoutError, match=r"alone\.wait_until_told\(\) at rank 0 \(process .* within 0.05 s"):
        rpc.rpc_sync("alone", wait_until_told, timeout=0.05)
    told.set()


told = threading.Event()


def wait_until_told():
    told.wait(60)


def test_shutdown_of_another_thread_ends_one_that_waits(monkeypatch):
    waits = threading.Event()
    monkeypatch.setattr(startup, "Deadline", SimpleNamespace(after=lambda limit: waits.set() or Deadline.after(limit)))
    told.clear()
    begin_alone()
    rpc.rpc_async("alone", wait_until_told)
    patient = threading.Thread(target=rpc.shutdown)
    patient.start()
    assert waits.wait(60)
    with pytest.raises(AlreadyInitializedError):
        begin_alone()
    rpc.shutdown(graceful=False)
    patient.join()
    told.set()
    rpc.shutdown()


def test_calls_need_an_agent():
    with pytest.raises(NotInitializedError, match="no RPC agent: call init_rpc"):
        rpc.rpc_sync("worker", max, args=(1, 2))
    rpc.shutdown()
    assert rpc.is_available()
    assert not Config().allow_pickle
