import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from asyncdist.ddp.sampler import DistributedSampler
from asyncdist.errors import UsageError
from tests.support.ranks import on_ranks


@given(
    count=st.integers(1, 70),
    replicas=st.integers(1, 17),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 50),
)
def test_indices_equal_torchs(count, replicas, shuffle, drop_last, seed, epoch):
    for rank in range(replicas):
        arguments = (range(count), replicas, rank, shuffle, seed, drop_last)
        ours, theirs = DistributedSampler(*arguments), TorchSampler(*arguments)
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert (len(ours), ours.total_size) == (len(theirs), theirs.total_size)


def test_data_loader_uses_the_sampler():
    data = list(range(10))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 1, shuffle=False))
    assert [batch.tolist() for batch in loader] == [[1, 3], [5, 7], [9]]


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range_is_refused(rank):
    with pytest.raises(UsageError, match="from 0 to 1"):
        DistributedSampler(range(4), 2, rank)


def deal(state, replicas, samples, batch, **options):
    """Let ``replicas`` ranks train ``batch`` samples each; return what they took by rank, and the state afterwards."""
    taken, states = [], []
    for rank in range(replicas):
        sampler = DistributedSampler(range(samples), replicas, rank, **options)
        if state is not None:
            sampler.load_state_dict(state)
        indices = list(sampler)
        assert len(indices) == len(sampler)
        taken.append(indices[:batch])
        sampler.advance(len(taken[-1]))
        states.append(sampler.state_dict())
    assert states.count(states[0]) == replicas
    return taken, states[0]


@given(
    count=st.integers(1, 60),
    first=st.integers(1, 7),
    second=st.integers(1, 7),
    batch=st.integers(0, 12),
    shuffle=st.booleans(),
)
def test_epoch_resumed_on_another_number_of_ranks_uses_each_sample_once(count, first, second, batch, shuffle):
    before, state = deal(None, first, count, batch, shuffle=shuffle)
    after, _ = deal(state, second, count, count, shuffle=shuffle)
    used = [index for taken in before + after for index in taken]
    assert set(used) == set(range(count))
    # Beyond that, only the ends are padded so that all ranks get the same number.
    assert len(used) < count + first + second
    assert len({len(taken) for taken in after}) == 1


@given(
    count=st.integers(1, 60),
    replicas=st.integers(1, 7),
    batch=st.integers(0, 12),
    drop_last=st.booleans(),
    epoch=st.integers(0, 5),
)
def test_resumed_epoch_goes_on_as_an_uninterrupted_one(count, replicas, batch, drop_last, epoch):
    for rank in range(replicas):
        made = [DistributedSampler(range(count), replicas, rank, drop_last=drop_last) for _ in range(2)]
        made[0].set_epoch(epoch)
        whole = list(made[0])
        made[0].advance(len(whole[:batch]))
        made[1].load_state_dict(made[0].state_dict())
        made[1].set_epoch(epoch)  # as at the top of a resumed loop
        assert list(made[1]) == whole[batch:]


@pytest.mark.processes
def test_position_counts_what_the_loop_has_used_although_workers_read_ahead():
    sampler = DistributedSampler(range(40), 2, 1, shuffle=False)
    # The fork server of Python 3.14's default would outlive the test.
    fork = {"multiprocessing_context": "fork", "num_workers": 2, "prefetch_factor": 2}
    loader = DataLoader(range(40), batch_size=4, sampler=sampler, **fork)
    batches = iter(loader)
    used = []
    for _ in range(2):
        batch = next(batches)
        used += batch.tolist()
        sampler.advance(len(batch))
    del batches
    resumed = DistributedSampler(range(40), 2, 1, shuffle=False)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.position == 16
    assert used + list(resumed) == list(range(1, 40, 2))


def test_state_warns_if_the_loop_did_not_count():
    sampler = DistributedSampler(range(10), 2, 0)
    assert sampler.state_dict()["position"] == 0
    next(iter(sampler))
    with pytest.warns(UserWarning, match=r"call sampler\.advance"):
        sampler.state_dict()
    sampler.set_epoch(1)
    assert sampler.state_dict()["epoch"] == 1


def test_another_epoch_begins_at_its_start():
    sampler = DistributedSampler(range(10), 2, 0)
    sampler.advance(5)
    assert list(sampler) == []
    sampler.set_epoch(1)
    assert len(list(sampler)) == 5


@pytest.mark.parametrize(
    ("length", "change", "words"),
    [
        (10, {"seed": 1}, "resume with the same dataset"),
        (10, {"shuffle": False}, "resume with the same dataset"),
        (11, {}, "length 10, but this sampler has 11"),
    ],
)
def test_checkpoint_of_another_order_or_dataset_is_refused(length, change, words):
    state = DistributedSampler(range(10), 1, 0).state_dict()
    with pytest.raises(UsageError, match=words):
        DistributedSampler(range(length), 1, 0, **change).load_state_dict(state)


@on_ranks(2)
def test_rest_of_an_epoch_is_dealt_to_another_group(group):
    sampler = DistributedSampler(range(12), 3, group.rank(), shuffle=False)
    sampler.advance(2)
    sampler.set_group(group)
    assert list(sampler) == [[6, 8, 10], [7, 9, 11]][group.rank()]
