"""Low-communication training takes the steps of its papers, whatever the members, the fragments and the delay."""

import asyncio
import copy
import functools
import threading

import pytest
import torch
from torch import nn

from asyncdist.base.background_loop import background_loop
from asyncdist.ddp.low_communication.diloco import BlockingDiLoCo, BlockingLocalSGD, DiLoCo, LocalSGD
from asyncdist.ddp.low_communication.fragments import fragments_of
from asyncdist.elastic.session import join
from asyncdist.errors import MismatchError, NoQuorumError, UsageError
from asyncdist.store import StoreServer
from asyncdist.testing.cluster import run_ranks, world_of
from tests.ddp import conftest as toy
from tests.support.ranks import on_ranks


def samples_of(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def compute(model, rank, step):
    model.zero_grad()
    toy.loss_of(model, *samples_of(rank, step)).backward()


def inner_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def outer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def simulate(size, steps, *, every, parts, delay, alpha, lr=0.7, momentum=0.9, keep=None):
    """Return the weights of all members after some steps, by the formulas of the papers, without any communication.

    ``parts`` are lists of places of parameters. From exchange number ``keep[0]`` on only the members ``keep[1]`` count.
    """
    models = [toy.network() for _ in range(size)]
    optimizers = [inner_of(model) for model in models]
    outer = weights(models[0])
    velocity = [torch.zeros_like(each) for each in outer]
    pending = []
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            compute(model, rank, step)
            optimizers[rank].step()
        for place, part in enumerate(parts):
            if (step - (place + 1) * every // len(parts)) % every == 0:
                members = range(size) if keep is None or step < keep[0] else keep[1]
                mean = {
                    each: torch.stack([outer[each] - weights(models[rank])[each] for rank in members]).mean(dim=0)
                    for each in part
                }
                pending.append((step + delay, mean))
        while pending and pending[0][0] <= step:
            for each, gradient in pending.pop(0)[1].items():
                velocity[each] = momentum * velocity[each] + gradient
                outer[each] = outer[each] - lr * (gradient + momentum * velocity[each])
                for model in models:
                    parameter = list(model.parameters())[each]
                    with torch.no_grad():
                        parameter.copy_(alpha * parameter + (1 - alpha) * outer[each])
    return [weights(model) for model in models]


async def on_all(size, program, **how):
    """Return what a program returns on each of ``size`` members."""
    async with world_of(size) as groups:
        return await asyncio.gather(*map(program, groups), **how)


async def take(diloco, model, group, steps):
    """Take inner steps with the samples of this member."""
    for step in steps:
        compute(model, group.rank(), step)
        await diloco.step()


async def train(group, **options):
    model = toy.network(seed=group.rank())  # rank 0's values overwrite the others
    async with DiLoCo(model, inner_of(model), outer_of(model), group=group, **options) as diloco:
        await take(diloco, model, group, range(1, 14))
        return weights(model)


def parts_of(fragments):
    places = {name: place for place, (name, _) in enumerate(toy.network().named_parameters())}
    return [[places[name] for name in fragment.names] for fragment in fragments_of(toy.network(), fragments)]


SETTINGS = [
    pytest.param({"every": 3, "fragments": 1, "delay": 0, "alpha": 0.0}, id="classic"),
    pytest.param({"every": 4, "fragments": 2, "delay": 0, "alpha": 0.0}, id="fragments"),
    pytest.param({"every": 4, "fragments": 3, "delay": 3, "alpha": 0.5}, id="streaming"),
    pytest.param({"every": 4, "fragments": 1, "delay": 2, "alpha": 0.0}, id="delayed"),
]


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("size", [1, 2, 3])
async def test_steps_equal_those_of_a_simulation_in_one_process(options, size):
    found = await on_all(size, functools.partial(train, **options))
    settings = {**options, "parts": parts_of(options["fragments"])}
    del settings["fragments"]
    # Leaving the block has taken the outer steps in progress after `weights` was called.
    for ours, expected in zip(found, simulate(size, 13, **settings), strict=True):
        toy.assert_close(ours, expected)


@pytest.mark.parametrize("options", SETTINGS)
def test_blocking_steps_equal_awaited_ones(options):
    def program(group):
        model = toy.network(seed=group.rank())
        with BlockingDiLoCo(model, inner_of(model), outer_of(model), group=group, **options) as diloco:
            for step in range(1, 14):
                compute(model, group.rank(), step)
                diloco.step()
            return weights(model)

    awaited = background_loop().run(on_all(2, functools.partial(train, **options)))
    for ours, expected in zip(run_ranks(2, program), awaited, strict=True):
        toy.assert_equal(ours, expected)


@pytest.mark.parametrize("compress", ["bf16", "int8", "int4"])
async def test_compressed_members_hold_the_same_outer_parameters(compress):
    async def program(group):
        model = toy.network()
        async with DiLoCo(model, inner_of(model), every=3, compress=compress, group=group) as diloco:
            await take(diloco, model, group, range(1, 10))
            assert diloco.savings.sent_nbytes > 0
            return weights(model)

    found = await on_all(3, program)
    for other in found[1:]:
        toy.assert_equal(other, found[0])


class WithComplexWeights(nn.Module):
    """A model with complex weights, or with the same weights as pairs of real numbers."""

    def __init__(self, *, as_pairs):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(3))
        weights = torch.tensor([1 + 2j, 3 - 1j])
        self.weights = nn.Parameter(torch.view_as_real(weights).clone() if as_pairs else weights)

    def loss(self, rank):
        weights = self.weights if self.weights.is_complex() else torch.view_as_complex(self.weights)
        return (weights * (1 + rank * 1j) - self.bias[:2]).abs().square().sum() + self.bias.square().sum()


@pytest.mark.parametrize("make", [BlockingDiLoCo, BlockingLocalSGD])
def test_complex_parameters_are_pairs_of_real_numbers(make):
    def train(group, *, as_pairs):
        model = WithComplexWeights(as_pairs=as_pairs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with make(model, optimizer, every=2, group=group) as training:
            for _ in range(6):
                optimizer.zero_grad()
                model.loss(group.rank()).backward()
                training.step()
        return [each.detach() for each in model.parameters()]

    def program(group):
        bias, weights = train(group, as_pairs=False)
        real_bias, pairs = train(group, as_pairs=True)
        torch.testing.assert_close(bias, real_bias)
        torch.testing.assert_close(torch.view_as_real(weights), pairs)
        assert pairs[:, 1].abs().min() > 0.01
        return weights.tolist()

    first, second = run_ranks(2, program)
    assert first == second


async def test_local_sgd_averages_parameters():
    async def program(group):
        model = toy.network()
        async with LocalSGD(model, inner_of(model), every=4, group=group) as local:
            await take(local, model, group, range(1, 9))
        return weights(model)

    found = await on_all(2, program)
    parts = [list(range(len(found[0])))]
    expected = simulate(2, 8, every=4, parts=parts, delay=0, alpha=0.0, lr=1.0, momentum=0.0)
    toy.assert_close(found[0], expected[0])
    toy.assert_equal(found[0], found[1])


@on_ranks(2)
def test_blocking_local_sgd_averages_parameters(group):
    model = toy.network(seed=group.rank())
    with BlockingLocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.0), every=2, group=group) as local:
        with torch.no_grad():
            model[0].weight += 1 + group.rank()
        for _ in range(2):
            local.step()
    change = model[0].weight.detach() - toy.network()[0].weight.detach()
    toy.assert_close([change], [torch.full_like(change, 1.5)])


# -- overlap -----------------------------------------------------------------------------------------


def slow_steps(diloco, group):
    """Yield before each inner step; the computation of step 5 lasts until the exchange launched after step 4 has ended."""
    ended = threading.Event()
    hook = diloco.group.register_hook(on_end=lambda record: ended.set())
    for step in range(1, 7):
        compute(diloco.model, group.rank(), step)
        if step == 5:
            assert ended.wait(60), "the exchange waits for the thread that computes"
        assert diloco.outer_steps == 0
        yield
    assert diloco.outer_steps == 1
    hook.remove()


@on_ranks(2)
def test_exchange_completes_while_the_thread_computes(group):
    model = toy.network()
    with BlockingDiLoCo(model, inner_of(model), every=4, delay=2, compress="int8", group=group) as diloco:
        for _ in slow_steps(diloco, group):
            diloco.step()


@on_ranks(2)
async def test_exchange_completes_while_a_worker_thread_computes(group):
    model = toy.network()
    async with DiLoCo(model, inner_of(model), every=4, delay=2, group=group) as diloco:
        steps = slow_steps(diloco, group)
        while await asyncio.to_thread(next, steps, "end") != "end":
            await diloco.step()


@on_ranks(2)
async def test_calls_of_the_program_do_not_meet_those_of_an_exchange(group):
    """The program uses the same group in an order of its own, also while exchanges are in progress."""
    model = toy.network()
    async with DiLoCo(model, inner_of(model), every=3, fragments=2, delay=1, compress="int8", group=group) as diloco:
        for step in range(1, 12):
            compute(model, group.rank(), step)
            loss = torch.tensor([float(group.rank())])
            work = group.all_reduce(loss)
            await diloco.step()
            await work
            assert loss.item() == 1.0


# -- loss and change of members ------------------------------------------------------------------------


async def test_survivors_repeat_an_exchange_without_a_member_that_failed():
    class Failed(Exception):
        pass

    async def program(group):
        model = toy.network()
        async with DiLoCo(model, inner_of(model), outer_of(model), every=3, delay=1, group=group) as diloco:
            for step in range(1, 14):
                compute(model, group.rank(), step)
                await diloco.step()
                if group.rank() == 1 and step == 5:
                    raise Failed
            assert diloco.group.member_ids == (0, 2)
            assert diloco.outer_steps == 4
        return weights(model)

    first, error, third = await on_all(3, program, return_exceptions=True)
    assert isinstance(error, Failed)
    parts = [list(range(len(first)))]
    expected = simulate(3, 13, every=3, parts=parts, delay=1, alpha=0.0, keep=(6, (0, 2)))
    toy.assert_close(first, expected[0])
    toy.assert_close(third, expected[2])


async def test_too_few_survivors_are_an_error():
    async def program(group):
        model = toy.network()
        async with DiLoCo(model, inner_of(model), every=2, min_size=2, group=group) as diloco:
            await diloco.step()
            if group.rank() == 1:
                raise ZeroDivisionError
            await diloco.step()

    error, other = await on_all(2, program, return_exceptions=True)
    assert isinstance(error, NoQuorumError)
    assert "2" in error.summary
    assert isinstance(other, ZeroDivisionError)


async def test_newcomer_receives_the_outer_state():
    """A second process joins the job: it gets the outer parameters, and both go on as equals."""
    server = await StoreServer.start("127.0.0.1", 0)
    url = f"asyncdist://127.0.0.1:{server.port}/job"
    reached, told = asyncio.Event(), []

    async def member(name, until):
        model = toy.network(seed=len(name))
        diloco = DiLoCo(model, inner_of(model), outer_of(model), every=2, delay=1)
        async with join(url, min_size=1, backend="inproc", timeout=20.0) as session:
            async for group in session.generations():
                async with diloco.on(group):
                    told.append((name, group.size(), diloco.outer_steps > 0))
                    while not until(diloco, group) and not group.changed:
                        compute(model, group.rank(), diloco.inner_steps + 1)
                        await diloco.step()
                        if diloco.outer_steps == 3:
                            reached.set()
                        await asyncio.sleep(0)
                    if not group.changed:
                        await diloco.synchronize()
        return diloco.inner_steps, weights(model)

    def done(diloco, group):
        # The members stop at the same step: some steps after the second one has come.
        done.since = done.since or (diloco.inner_steps if group.size() == 2 else 0)
        return group.size() == 2 and diloco.inner_steps >= done.since + 7

    done.since = 0
    try:
        first = asyncio.create_task(member("first", done))
        await asyncio.wait_for(reached.wait(), 60)
        second = asyncio.create_task(member("second", done))
        one, other = await asyncio.wait_for(asyncio.gather(first, second), 30)
    finally:
        await server.close()
    assert told[0] == ("first", 1, False)
    assert ("second", 2, True) in told
    assert one[0] == other[0] > 0
    toy.assert_equal(one[1], other[1])


# -- checkpoints ----------------------------------------------------------------------------------------


async def test_resumed_training_equals_an_uninterrupted_one():
    options = {"every": 4, "fragments": 2, "delay": 1, "compress": "int8"}

    async def program(group, first, last, saved=None):
        model = toy.network()
        inner, outer = inner_of(model), outer_of(model)
        diloco = DiLoCo(model, inner, outer, group=group, **options)
        if saved is not None:
            diloco.load_state_dict(saved["diloco"])
            inner.load_state_dict(saved["inner"])
            for fragment, feedback in zip(diloco.fragments, saved["feedback"], strict=True):
                fragment.feedback.load_state_dict(feedback)
        state = None
        async with diloco:
            for step in range(first, last + 1):
                compute(model, group.rank(), step)
                await diloco.step()
                if step == 10:
                    await diloco.synchronize()
                    feedback = [fragment.feedback.state_dict() for fragment in diloco.fragments]
                    state = copy.deepcopy(
                        {"diloco": diloco.state_dict(), "inner": inner.state_dict(), "feedback": feedback}
                    )
        return weights(model), state

    async with world_of(2) as groups:
        whole = await asyncio.gather(*(program(group, 1, 19) for group in groups))
    async with world_of(2) as groups:
        resumed = await asyncio.gather(
            *(program(group, 11, 19, state) for group, (_, state) in zip(groups, whole, strict=True))
        )
    for (expected, _), (found, _) in zip(whole, resumed, strict=True):
        toy.assert_equal(found, expected)


@on_ranks(1)
async def test_checkpoint_during_an_exchange_is_refused(group):
    model = toy.network()
    async with DiLoCo(model, inner_of(model), every=3, delay=2, group=group) as diloco:
        for _ in range(3):
            await diloco.step()
        with pytest.raises(UsageError, match="call synchronize"):
            diloco.state_dict()
        await diloco.synchronize()
        diloco.state_dict()


async def test_synchronize_makes_the_members_equal():
    async def program(group):
        model = toy.network()
        model.register_buffer("count", torch.tensor(group.rank()))
        async with DiLoCo(model, inner_of(model), every=5, fragments=2, delay=3, group=group) as diloco:
            await take(diloco, model, group, range(1, 5))
            await diloco.synchronize()
            await diloco.synchronize()  # without steps in between nothing changes
            assert diloco.outer_steps == 3  # one of the schedule, in progress, and two of synchronize()
            assert model.count == 0
        return weights(model)

    one, other = await on_all(2, program)
    toy.assert_equal(one, other)


def test_checkpoint_of_another_model_is_refused():
    model, other = toy.network(), nn.Linear(2, 2)
    state = DiLoCo(model, inner_of(model), every=2).state_dict()
    with pytest.raises(UsageError, match="same model and fragments"):
        DiLoCo(other, inner_of(other), every=2).load_state_dict(state)


# -- savings, arguments ----------------------------------------------------------------------------------


@on_ranks(2)
async def test_savings_count_what_was_sent(group):
    model = toy.network()
    count = sum(parameter.numel() for parameter in model.parameters())
    async with DiLoCo(model, inner_of(model), every=5, compress="bf16", group=group) as diloco:
        for _ in range(10):
            await diloco.step()
    savings = diloco.savings
    assert (savings.inner_steps, savings.outer_steps) == (10, 2)
    assert savings.sent_nbytes == 2 * 2 * count
    assert savings.data_parallel_nbytes == 10 * 4 * count
    assert savings.factor == 10
    assert "10 inner and 2 outer steps" in str(savings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 2, "fragments": 3}, "at least the number of fragments, 3"),
        ({"every": 2, "fragments": 7}, "from 1 to 6"),
        ({"every": 2, "delay": 2}, "from 0 to every - 1, which is 1"),
        ({"every": 2, "alpha": 2.0}, "from 0 to 1"),
        ({"every": 2, "compress": "zip"}, "'bf16', 'int8', 'int4'"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    model = toy.network()
    with pytest.raises(UsageError, match=message):
        DiLoCo(model, inner_of(model), **options)
    with pytest.raises(UsageError, match=r"lacks the parameter '0\.weight'"):
        DiLoCo(model, inner_of(model), torch.optim.SGD([model[2].weight]), every=2)


async def test_step_outside_the_block_is_refused():
    model = toy.network()
    with pytest.raises(UsageError, match="not entered"):
        await DiLoCo(model, inner_of(model), every=2).step()


@pytest.mark.parametrize("name", ["every", "fragments"])
@on_ranks(2)
async def test_members_with_different_arguments_are_told(group, name):
    model = toy.network()
    options = {"every": 4, "fragments": 2}
    options[name] += group.rank()
    with pytest.raises(MismatchError, match=f"DiLoCo has {name}="):
        await DiLoCo(model, inner_of(model), group=group, **options).__aenter__()


def test_fragments_have_about_equal_sizes():
    model = nn.Sequential(*[nn.Linear(10, 10) for _ in range(12)])
    sizes = [fragment.outer.numel() for fragment in fragments_of(model, 4)]
    assert sum(sizes) == 12 * 110
    assert max(sizes) - min(sizes) <= 120
    assert [len(fragment.names) for fragment in fragments_of(model, 24)] == [1] * 24


def test_fragments_may_be_modules():
    model = toy.network()
    first, second = fragments_of(model, [model[0], [*model[2].parameters(), *model[4].parameters()]])
    assert first.names == ["0.weight", "0.bias"]
    assert len(second.names) == 4
    with pytest.raises(UsageError, match=r"'2\.weight' is in none"):
        fragments_of(model, [model[0]])
    with pytest.raises(UsageError, match=r"'0\.weight' is in fragments 0 and 1"):
        fragments_of(model, [model[0], model])


# -- accuracy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compress", ["int4", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (None, "int8"))]
)
async def test_members_with_different_digits_learn_all_of_them(compress):
    """Each member sees five of the ten digits only, so without the exchanges it would know half of the held-out ones."""
    from sklearn.datasets import load_digits  # takes a second to import

    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 8 - 1, torch.tensor(data.target)

    async def program(group):
        torch.manual_seed(0)
        model = nn.Linear(64, 10)
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        own = torch.nonzero(labels[:1400] % 2 == group.rank()).flatten()
        choice = torch.Generator().manual_seed(group.rank())
        options = {"every": 10, "fragments": 2, "delay": 2, "alpha": 0.5, "compress": compress}
        async with DiLoCo(model, inner, group=group, **options) as diloco:
            for _ in range(150):
                batch = own[torch.randint(len(own), (32,), generator=choice)]
                inner.zero_grad()
                nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                await diloco.step()
            await diloco.synchronize()
        return (model(images[1400:]).argmax(dim=1) == labels[1400:]).float().mean().item()

    accuracies = await on_all(2, program)
    assert accuracies[0] == accuracies[1] > 0.8
