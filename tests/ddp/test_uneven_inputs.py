"""Ranks with different numbers of inputs inside ``join()``, compared with the arithmetic of a single process."""

import functools
import inspect
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import MismatchError, UnevenInputsError, UsageError
from tests.ddp import conftest as toy
from tests.support.ranks import on_ranks

STEPS = 4


def test_join_takes_the_arguments_of_torchs():
    def arguments(module):
        return [(one.name, one.default) for one in inspect.signature(module.join).parameters.values()]

    assert arguments(DistributedDataParallel) == arguments(nn.parallel.DistributedDataParallel)


def batches(rank, count):
    """Return the inputs and targets of the first ``count`` steps of a rank."""
    own = [tensor[rank * 3 * STEPS :].split(3) for tensor in toy.samples(3 * STEPS * 3)]
    return list(zip(*own, strict=True))[:count]


def alone(counts, by_all, epochs=1):
    """Return the parameters that a single process trains on the inputs of ranks with these counts."""
    module = toy.network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in list(range(max(counts))) * epochs:
        optimizer.zero_grad()
        going = [rank for rank, count in enumerate(counts) if count > step]
        for rank in going:
            divisor = len(counts) if by_all else len(going)
            (toy.loss_of(module, *batches(rank, STEPS)[step]) / divisor).backward()
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize(("by_all", "as_view"), [(True, True), (False, False)])
@pytest.mark.parametrize(
    "counts",
    [
        [1, 3],
        [3, 0, 2],
        *(
            pytest.param(counts, marks=pytest.mark.exhaustive)
            for counts in ([4, 2], [0, 3], [1, 2, 4], [2, 2, 2], [0, 0], [2])
        ),
    ],
    ids=str,
)
def test_training_equals_a_single_process_on_all_inputs(together, counts, by_all, as_view):
    def rank(group):
        model = toy.wrapped(group, gradient_as_bucket_view=as_view)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):  # the second time buckets follow the order of arrival
            with model.join(divide_by_initial_world_size=by_all):
                for batch in batches(group.rank(), counts[group.rank()]):
                    optimizer.zero_grad()
                    toy.loss_of(model, *batch).backward()
                    optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    results = together(len(counts), rank)
    for ours in results:
        toy.assert_close(ours, alone(counts, by_all, epochs=2))
        toy.assert_equal(ours, results[0])


def test_no_sync_accumulates_inside_join(together):
    counts = [2, 4]

    def rank(group):
        module = toy.network()
        model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=toy.SMALL_MB)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with model.join():
            own = batches(group.rank(), counts[group.rank()])
            for first, second in zip(own[::2], own[1::2], strict=True):
                optimizer.zero_grad()
                with model.no_sync():
                    toy.loss_of(model, *first).backward()
                toy.loss_of(model, *second).backward()
                optimizer.step()
        return [parameter.detach() for parameter in module.parameters()]

    reference = toy.network()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for each, count in enumerate(counts):
            for batch in batches(each, count)[2 * step : 2 * step + 2]:
                (toy.loss_of(reference, *batch) / 2).backward()
        optimizer.step()
    for ours in together(2, rank):
        toy.assert_close(ours, [parameter.detach() for parameter in reference.parameters()])


@on_ranks(2)
def test_join_allows_forwards_without_backward_and_repeated_backwards(group):
    """Ranks that continue may take every kind of step, including a forward without a backward."""
    model, reference = toy.wrapped(group), toy.network()
    with model.join():
        for batch in batches(group.rank(), 1 + 2 * group.rank()):
            model.zero_grad()
            toy.loss_of(model, *batch)
            with torch.no_grad():
                toy.loss_of(model, *batch)
            loss = toy.loss_of(model, *batch) + toy.loss_of(model, *batch)
            loss.backward(retain_graph=True)
            loss.backward()
            own = toy.gradients(model)
    toy.assert_equal(toy.gradients(model), own)  # a rank without inputs keeps its own gradients
    if group.rank() == 1:
        toy.loss_of(reference, *batches(1, 3)[2]).backward()
        # The first backward averages two losses over two ranks. The second adds two losses and averages the sum.
        toy.assert_close(own, [(2 / 2 + 2) / 2 * gradient for gradient in toy.gradients(reference)])


class Tally(nn.Module):
    """A layer whose buffer adds up this rank's inputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().sum()
        return self.weight * x


@pytest.mark.parametrize(
    ("counts", "left"),
    [
        ([2, 2], [110.0, 200.0]),  # rank 1's after the first step, as in torch, then each rank's own
        ([3, 1], [111.0, 111.0]),
        ([1, 3], [300.0, 300.0]),  # rank 1's own from the second step on
    ],
)
def test_buffers_are_those_of_the_highest_rank_with_inputs(together, counts, left):
    def rank(group):
        own = group.rank()
        model = DistributedDataParallel(Tally(), process_group=group)
        with model.join():
            for step in range(counts[own]):
                model(torch.full((1,), float([1, 10, 100][step] if own == 0 else 100))).sum().backward()
        tally = model.module.seen.item()
        model(torch.zeros(1)).sum().backward()  # outside join() every rank gets rank 0's buffer
        return tally, model.module.seen.item()

    results = together(2, rank)
    assert [tally for tally, _ in results] == left
    assert {later for _, later in results} == {left[0]}


@on_ranks(2)
def test_ranks_with_inputs_may_evaluate_inside_join(group):
    model = DistributedDataParallel(Tally(), process_group=group)
    with model.join():
        for _ in range(1 + group.rank()):
            model.train()(torch.ones(1)).sum().backward()
        if group.rank() == 1:
            with torch.no_grad():  # overwrites buffers, as the first forward after a training step does
                model.eval()(torch.ones(1))
    tally = model.module.seen.item()
    model.train()(torch.ones(1)).sum().backward()  # overwrites the buffers of both ranks
    assert (tally, model.module.seen.item()) == (2.0, 3.0)


@pytest.mark.parametrize("counts", [[1, 3, 2], [2, 0, 0]], ids=str)
def test_early_termination_raises_on_all_ranks_if_requested(together, counts):
    shortest = min(counts)

    def rank(group):
        model = toy.wrapped(group)
        done = []

        def epoch(count):
            with model.join(throw_on_early_termination=True):
                for batch in batches(group.rank(), count):
                    toy.loss_of(model, *batch).backward()
                    done.append(batch)

        epoch(2)  # even inputs raise nothing
        done.clear()
        with pytest.raises(UnevenInputsError, match="ran out of inputs while") as caught:
            epoch(counts[group.rank()])
        assert len(done) == shortest
        toy.loss_of(model, *batches(group.rank(), 1)[0]).backward()  # the group and the model can be used
        assert (caught.value.ended, caught.value.going) == (ended, going)

    ended = tuple(rank for rank, count in enumerate(counts) if count == shortest)
    going = tuple(rank for rank, count in enumerate(counts) if count > shortest)
    together(3, rank)


@on_ranks(2)
def test_error_inside_join_is_raised_without_shadowing(group):
    model = DistributedDataParallel(Tally(), process_group=group)
    with pytest.raises(KeyError, match="mine"), model.join():
        raise KeyError("mine")
    with model.join(), pytest.raises(UsageError, match=r"inside join\(\) already"), model.join():
        pass
    model(torch.ones(1)).sum().backward()
    assert model.module.weight.grad.item() == 1.0


@on_ranks(2)
def test_ranks_do_not_synchronise_without_join(group):
    class Silent(toy.Counting):
        def all_gather_single(self, *_, **__):
            raise AssertionError("ranks meet")

    model = DistributedDataParallel(toy.network(), process_group=Silent(group))
    toy.loss_of(model, *batches(group.rank(), 1)[0]).backward()
    with model.join(enable=False):
        toy.loss_of(model, *batches(group.rank(), 1)[0]).backward()
    with pytest.raises(AssertionError, match="ranks meet"), model.join():
        pass


@on_ranks(3)
def test_mismatched_ranks_inside_join_raise_on_every_rank(group):
    model = DistributedDataParallel(Tally(), process_group=group)

    def epoch():
        with model.join():
            if group.rank() == 1:
                model.require_forward_param_sync = False  # as after an evaluation on this rank only
            if group.rank() < 2:
                model(torch.ones(1)).sum().backward()

    with pytest.raises(MismatchError, match=r"rank 0 is at the broadcast of buffers .*, rank 1 at the average"):
        epoch()


PROGRAM = Path(__file__).parent / "program_uneven.py"


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_killed_rank_ends_backward_and_join_of_the_others(nursery, tmp_path, transport):
    where = f"file://{tmp_path}/world"
    ranks = [nursery.start(PROGRAM, "train", rank, where, transport) for rank in range(3)]
    sums = [rank.hear() for rank in ranks]
    assert sums[0] == sums[1] == sums[2]
    assert sums[0] == pytest.approx([-(1 + 2 + 3) / 3 - (2 + 3) / 3 - 2 / 3] * 2)
    ranks[1].kill()
    for rank in (ranks[0], ranks[2]):
        assert rank.hear() == 1
        assert rank.wait() == 0
        assert "never retrieved" not in rank.output()


def leave(optimizer, group):
    pass


@pytest.fixture
def warned(together, monkeypatch):
    """Return the warnings of two ranks that train two epochs: ``warned(optimizer, counts, after_each_epoch)``."""
    found = []
    monkeypatch.setattr(warnings, "warn", lambda message, *arguments, **options: found.append(str(message)))

    def warned(optimizer_of, counts, after=leave):
        def rank(group):
            model = toy.wrapped(group)
            optimizer = optimizer_of(model.parameters())
            for _ in range(2):
                with model.join():
                    for batch in batches(group.rank(), counts[group.rank()]):
                        optimizer.zero_grad()
                        toy.loss_of(model, *batch).backward()
                        optimizer.step()
                after(optimizer, group)

        together(2, rank)
        return found

    return warned


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def share_state(optimizer, group):
    for state in optimizer.state.values():
        for tensor in state.values():
            group.broadcast(tensor, 1, background=False).wait()


OLDER = "is older than that of rank 1, because this rank ran out of inputs before it in join()"


@pytest.mark.parametrize("optimizer", [momentum, torch.optim.Adam])
def test_step_after_an_uneven_join_warns_once_of_state_that_is_older_than_that_of_others(warned, optimizer):
    (message,) = warned(optimizer, [1, 3])
    assert OLDER in message


@pytest.mark.parametrize(
    ("optimizer", "counts", "after"),
    [
        pytest.param(torch.optim.Adam, [1, 3], share_state, id="the state was broadcast"),
        pytest.param(momentum, [2, 2], leave, id="even inputs"),
        pytest.param(functools.partial(torch.optim.SGD, lr=0.1), [1, 3], leave, id="an optimizer without state"),
    ],
)
def test_no_warning_if_no_state_is_older(warned, optimizer, counts, after):
    assert not warned(optimizer, counts, after)


@pytest.mark.processes
def test_torchs_join_warns_of_older_state_unless_the_optimizer_follows(nursery, tmp_path):
    ranks = [nursery.start(PROGRAM, "train_in_torchs_join", rank, f"file://{tmp_path}/world") for rank in range(2)]
    (own, first), (following, second) = ranks[0].hear()
    assert [OLDER in each for each in own] == [True]
    assert following == []
    assert ranks[1].hear() == (([], first), ([], second))
    assert [rank.wait() for rank in ranks] == [0, 0]
