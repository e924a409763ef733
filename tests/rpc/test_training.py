"""Modules of other processes: forward and backward equal those of a local module, and gradients stay at the owner."""

import asyncio
import contextlib
import gc
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from asyncdist import rpc
from asyncdist.config import Config
from asyncdist.errors import LoopThreadError, UsageError
from asyncdist.rpc.training import ForwardGraph

CONFIG = Config(timeout=60.0)


class Pair(nn.Module):
    """Has two outputs, of which one has no gradient, and takes a nested argument."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs, scale=None):
        found = self.layer(inputs["x"])
        return {"sum": found * (1 if scale is None else scale), "best": found.argmax(dim=1)}


def model(seed, *sizes):
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(*pair) for pair in itertools.pairwise(sizes)])


@pytest.fixture
def attached(serving):
    """Serve a module, and attach to it: ``async with attached(module) as (remote, owner)``."""

    @contextlib.asynccontextmanager
    async def attached(module, optimizer=None):
        served = rpc.ServedModule(module, optimizer)
        async with serving(served) as it:
            yield await rpc.RemoteModule.attach(it), served

    return attached


async def test_training_through_a_remote_module_equals_local_training(attached):
    first, middle, last = model(1, 8, 6), model(2, 6, 5), model(3, 5, 2)
    local = nn.Sequential(model(1, 8, 6), model(2, 6, 5), model(3, 5, 2))
    local_optimizer = torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    async with attached(middle) as (remote, _):
        remote_optimizer = await rpc.RemoteOptimizer.create(torch.optim.SGD, [remote], lr=0.1, momentum=0.9)
        own = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1, momentum=0.9)
        for step in range(5):
            inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            labels = torch.arange(16) % 2
            own.zero_grad()
            loss = functional.cross_entropy(last(await remote(first(inputs))), labels)
            await rpc.backward(loss)
            own.step()
            await remote_optimizer.step()
            local_optimizer.zero_grad()
            expected = functional.cross_entropy(local(inputs), labels)
            expected.backward()
            local_optimizer.step()
            assert torch.equal(loss, expected)
        state = await remote.state_dict()
        assert all(torch.equal(state[name], value) for name, value in local[1].state_dict().items())
        assert torch.equal(first[0].weight, local[0][0].weight)


async def test_inputs_get_gradients_and_those_of_parameters_stay(attached):
    torch.manual_seed(0)
    module = Pair()
    async with attached(module) as (remote, _):
        inputs = torch.randn(5, 4, requires_grad=True)
        scale = torch.randn(3, requires_grad=True)
        found = await remote({"x": inputs}, scale=scale)
        assert not found["best"].requires_grad
        assert torch.equal(found["best"], module.layer(inputs).argmax(dim=1))
        await rpc.backward(found["sum"].square().sum())
        mine = inputs.grad, scale.grad
        expected = torch.autograd.grad(
            module({"x": inputs}, scale=scale)["sum"].square().sum(), [inputs, scale, *module.parameters()]
        )
        assert all(torch.equal(*pair) for pair in zip(mine, expected[:2], strict=True))
        theirs = await remote.gradients()
        assert torch.equal(theirs["layer.weight"], expected[2])
        assert all(parameter.grad is None for parameter in module.parameters())


async def test_module_without_inputs_that_have_gradients_is_trained(attached):
    module = nn.EmbeddingBag(10, 3)
    before = module.weight.detach().clone()
    async with attached(module, lambda parameters: torch.optim.SGD(parameters, lr=1.0)) as (remote, _):
        output = await remote(torch.tensor([[1, 2], [3, 4]]))
        await rpc.backward(output.sum())
        await remote.step()
        assert not torch.equal(module.weight[1], before[1])
        assert torch.equal(module.weight[5], before[5])
        assert await remote.gradients() == {}


async def test_gradients_accumulate_and_are_cleared(attached):
    async with attached(model(0, 2, 1)) as (remote, _):
        for _ in range(3):
            await rpc.backward((await remote(torch.ones(1, 2))).sum())
        assert torch.equal((await remote.gradients())["0.bias"], torch.tensor([3.0]))
        await remote.zero_grad()
        assert await remote.gradients() == {}


async def test_trainers_do_not_mix_their_gradients(job):
    module = model(0, 2, 1)
    bias = module[0].bias.item()
    async with (
        rpc.serve({"it": rpc.ServedModule(module)}, job, config=CONFIG),
        rpc.connect(job, config=CONFIG) as one,
        rpc.connect(job, config=CONFIG) as two,
    ):
        trainers = [await rpc.RemoteModule.attach(await session.find("it")) for session in (one, two)]
        optimizers = [await rpc.RemoteOptimizer.create("SGD", [each], lr=0.5) for each in trainers]
        losses = await asyncio.gather(*[each(torch.ones(4, 2)) for each in trainers])
        await asyncio.gather(*[rpc.backward(loss.sum()) for loss in losses])
        await optimizers[0].step()
        assert module[0].bias.item() == pytest.approx(bias - 2.0)
        assert torch.equal((await trainers[1].gradients())["0.bias"], torch.tensor([4.0]))


async def test_trainer_goes_back_through_parameters_that_another_has_updated(attached):
    served = nn.Sequential(model(4, 3, 4), nn.Tanh(), model(5, 4, 2))
    async with attached(served, lambda parameters: torch.optim.SGD(parameters, lr=0.1)) as (first, owner):
        second = await rpc.RemoteModule.attach(rpc.refer(owner))
        outputs = [await module(torch.ones(2, 3, requires_grad=True)) for module in (first, second)]
        before = served[0][0].weight.detach().clone()
        for output, module in zip(outputs, (first, second), strict=True):
            await rpc.backward(output.sum())
            await module.step()
            assert not torch.equal(served[0][0].weight, before)
            before = served[0][0].weight.detach().clone()


async def test_graph_at_the_owner_ends_with_the_output(job, eventually):
    async with (
        rpc.serve({"it": rpc.ServedModule(model(0, 2, 1))}, job, config=CONFIG),
        rpc.connect(job, config=CONFIG) as session,
    ):
        remote = await rpc.RemoteModule.attach(await session.find("it"))
        output = await remote(torch.ones(1, 2))
        assert num_graphs() == 1
        del output
        await eventually(lambda: num_graphs() == 0)
        with torch.no_grad():
            output = await remote(torch.ones(1, 2))
        assert not output.requires_grad
        assert num_graphs() == 0


def num_graphs():
    gc.collect()
    return sum(isinstance(each, ForwardGraph) for each in gc.get_objects())


async def test_blocking_backward_on_the_loop_is_refused_and_works_in_a_thread(attached):
    async with attached(model(0, 2, 1)) as (remote, _):
        loss = (await remote(torch.ones(1, 2))).sum()
        with pytest.raises(LoopThreadError, match=r"await rpc.backward\(loss\)"):
            loss.backward()
        await asyncio.get_running_loop().run_in_executor(None, (await remote(torch.ones(1, 2))).sum().backward)
        assert torch.equal((await remote.gradients())["0.bias"], torch.tensor([1.0]))


async def test_wrong_optimizers_are_refused(attached):
    class Own(torch.optim.SGD):
        pass

    async with attached(model(0, 2, 1)) as (remote, _):
        with pytest.raises(UsageError, match="Own is none"):
            await rpc.RemoteOptimizer.create(Own, [remote], lr=1.0)
        with pytest.raises(rpc.RemoteError, match="has no optimizer 'lr_scheduler'"):
            await rpc.RemoteOptimizer.create("lr_scheduler", [remote])
        with pytest.raises(rpc.RemoteError, match="the module has no optimizer"):
            await remote.step()


async def test_owner_that_ends_fails_forward_and_backward(job):
    async with rpc.connect(job, config=CONFIG) as session:
        async with rpc.serve({"it": rpc.ServedModule(model(0, 2, 1))}, job, config=CONFIG):
            remote = await rpc.RemoteModule.attach(await session.find("it"))
            loss = (await remote(torch.ones(1, 2))).sum()
        with pytest.raises(rpc.CalleeLostError):
            await rpc.backward(loss)
        with pytest.raises(rpc.CalleeLostError):
            await remote(torch.ones(1, 2))
