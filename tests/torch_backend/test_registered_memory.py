"""Registered memory for torch: the pool behind ``ProcessGroup.allocate_tensor``, and buckets of torch's DDP."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import asyncdist.torch_backend  # noqa: F401 - registers the back end "asyncdist"
from asyncdist.errors import SharedMemoryError
from asyncdist.groups.group import Group
from asyncdist.kernel.memory import registered
from asyncdist.kernel.memory.shared_arena import arena
from asyncdist.torch_backend.memory_pool import MemoryPool

CPU = torch.device("cpu")
COUNT = 10_000


def is_registered(tensor):
    return arena().offset_of(tensor.data_ptr(), tensor.nbytes) is not None


@pytest.fixture
def memory_is_full(monkeypatch):
    """Let every allocation in registered memory fail."""

    def full(*size, **how):
        raise SharedMemoryError("no memory is left")

    monkeypatch.setattr(registered, "empty", full)


def test_released_memory_is_allocated_again():
    pool = MemoryPool()
    first = pool.lend(100_000)
    assert first.shape == (100_000,)
    assert is_registered(first)
    place, view = first.data_ptr(), first[10:]
    del first
    other = pool.lend(100_000)
    assert other.data_ptr() != place, "a view of the first one lives"
    del view
    assert pool.lend(100_000).data_ptr() == place


def test_released_memory_rests_before_it_is_allocated_again():
    pool = MemoryPool()
    places = [pool.lend(3 << 20).data_ptr() for _ in range(40)]
    assert len(set(places)) == 6, "16 MiB of other memory are lent between two uses of the same"
    assert places == [*places[:6]] * 6 + places[:4]


def test_full_memory_is_allocated_again_without_rest():
    pool = MemoryPool()
    places = {pool.lend(nbytes).data_ptr() for _ in range(5) for nbytes in (9 << 20, 1 << 20, 10 << 20)}
    assert len(places) <= 6


def test_pool_keeps_no_more_than_its_peak_and_the_resting_memory():
    gc.collect()
    used, pool = arena().used_nbytes, MemoryPool()
    for nbytes in (1 << 20, 2 << 20, 3 << 20, 2 << 20, 20 << 20, 7 << 20, 5 << 20):
        pool.lend(nbytes)
        assert arena().used_nbytes - used <= (20 + 16 << 20) + nbytes
    pool.lend(4096)
    assert arena().used_nbytes - used <= 20 + 16 << 20
    del pool
    gc.collect()
    assert arena().used_nbytes == used


@pytest.fixture
def group(monkeypatch):
    """The asyncdist backend of a world of one, patched to report shared memory between ranks."""
    monkeypatch.setattr(Group, "shares_memory", True)
    dist.init_process_group("asyncdist", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_group_allocates_registered_memory_where_ranks_share_memory(group, monkeypatch):
    assert group._get_backend(CPU).supports_tensor_alloc(CPU)
    assert not group.supports_tensor_alloc(torch.device("meta"))
    made = group.allocate_tensor(1000, dtype=torch.bfloat16, device=CPU)
    assert (made.shape, made.dtype) == ((1000,), torch.bfloat16)
    assert is_registered(made)
    assert group.allocate_tensor(0, dtype=torch.float32, device=CPU).shape == (0,)
    monkeypatch.setattr(Group, "shares_memory", False)
    assert not group.supports_tensor_alloc(CPU)
    assert not is_registered(group.allocate_tensor(1000, dtype=torch.float32, device=CPU))


def test_full_registered_memory_allocates_ordinary_tensors(group, memory_is_full):
    assert not is_registered(group.allocate_tensor(1000, dtype=torch.float32, device=CPU))


def gradients_of_torchs_ddp(features, dtype=torch.float32):
    """Return the gradients of three steps: torch allocates buckets at construction and again after the first step."""
    model = DistributedDataParallel(nn.Linear(features, 200, bias=False).to(dtype), gradient_as_bucket_view=True)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, features, dtype=dtype)).sum().backward()
        yield model.module.weight.grad


@pytest.mark.parametrize(
    ("features", "dtype", "registered"),
    [(100, torch.float32, True), (100, torch.bfloat16, True), (10, torch.float32, False)],
)
def test_large_buckets_of_torchs_ddp_are_registered(group, features, dtype, registered):
    for gradient in gradients_of_torchs_ddp(features, dtype):
        assert is_registered(gradient) == registered
        assert bool((gradient == 2).all())
    assert not is_registered(torch.empty([COUNT], dtype=dtype, device="cpu")), "a later allocation is registered"


def test_full_registered_memory_allocates_buckets_in_ordinary_memory(group, memory_is_full):
    for gradient in gradients_of_torchs_ddp(100):
        assert not is_registered(gradient)
        assert bool((gradient == 2).all())
