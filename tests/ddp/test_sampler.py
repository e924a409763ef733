from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from asyncdist.ddp.sampler import DistributedSampler
from asyncdist.errors import UsageError


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
