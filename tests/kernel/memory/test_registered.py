"""Registered tensors: allocation and release of their memory, and moving tensors and modules into it."""

import copy
import errno
import gc
import io
import logging
import os
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import asyncdist
from asyncdist.errors import SharedMemoryError, UnsupportedError, UsageError
from asyncdist.kernel.memory import registered
from asyncdist.kernel.memory.registered import register
from asyncdist.kernel.memory.shared_arena import PAGE_NBYTES, arena, unavailable
from asyncdist.testing.cluster import run_ranks

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no shared memory: {unavailable()}")


def is_registered(tensor):
    return arena().offset_of(tensor.data_ptr(), tensor.nbytes) is not None


@pytest.fixture
def nothing_kept():
    """The number of used bytes, which must be the same after the test."""
    gc.collect()
    before = arena().used_nbytes
    yield before
    gc.collect()
    assert arena().used_nbytes == before


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize("size", [(3,), (2, 5), ((2, 5),), ([4],), (torch.Size([2, 0, 3]),), ((),), (0,)])
def test_empty_takes_sizes_like_torch(size):
    tensor = asyncdist.empty(*size)
    like = torch.empty(*size)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), like.dtype)
    assert tensor.is_contiguous()
    if tensor.numel():
        assert is_registered(tensor)
        assert tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.bool, torch.complex128, torch.float8_e4m3fn])
def test_empty_of_any_dtype(dtype):
    tensor = asyncdist.empty(1001, dtype=dtype)
    assert tensor.dtype is dtype
    tensor.copy_(torch.ones(1001))
    assert tensor.to(torch.complex128).tolist() == [1] * 1001


def test_empty_has_the_default_dtype_and_is_a_leaf():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        tensor = asyncdist.empty(4, requires_grad=True)
    finally:
        torch.set_default_dtype(before)
    assert tensor.dtype is torch.float64
    assert tensor.is_leaf
    with torch.no_grad():
        tensor.fill_(3)
    (tensor * tensor).sum().backward()
    assert tensor.grad.tolist() == [6] * 4


@pytest.mark.parametrize(("size", "error"), [((-1,), RuntimeError), (("x",), TypeError), ((2.5,), TypeError)])
def test_empty_refuses_arguments_like_torch(size, error):
    with pytest.raises(error):
        asyncdist.empty(*size)


def test_empty_with_shared_false_is_an_ordinary_tensor():
    assert not is_registered(asyncdist.empty(100, shared=False))


def test_memory_is_freed_with_the_last_view(nothing_kept):
    tensor = asyncdist.empty(10, PAGE_NBYTES)
    assert arena().used_nbytes == nothing_kept + tensor.nbytes
    view = tensor[3:5].t()
    del tensor
    assert arena().used_nbytes > nothing_kept
    view.fill_(1)
    del view
    assert arena().used_nbytes == nothing_kept


@pytest.mark.usefixtures("nothing_kept")
def test_freed_memory_is_reused():
    generator = torch.Generator().manual_seed(0)
    kept = []
    for count in torch.randint(1, 600_000, (100,), generator=generator).tolist():
        tensor = asyncdist.empty(count, dtype=torch.int32)
        tensor.fill_(count)
        kept.append(tensor)
        if len(kept) > 10:
            gone = kept.pop(count % 10)
            assert gone.unique().tolist() == [gone.numel()]
    assert all(tensor.unique().tolist() == [tensor.numel()] for tensor in kept)
    highest = max(tensor.data_ptr() + tensor.nbytes for tensor in kept) - arena().mapping.address
    # The test allocates about 115 MiB, of which it keeps about 12 MiB.
    assert highest < 60 << 20


@pytest.mark.usefixtures("nothing_kept")
def test_threads_allocate_and_free_concurrently():
    def work():
        for _ in range(200):
            tensor = asyncdist.empty(3 * PAGE_NBYTES, dtype=torch.uint8)
            tensor.fill_(7)
            assert int(tensor.sum()) == 7 * tensor.numel()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()


@pytest.mark.usefixtures("nothing_kept")
def test_allocation_beyond_the_arena_raises():
    with pytest.raises(SharedMemoryError, match="release registered tensors"):
        asyncdist.empty(arena().nbytes + 1, dtype=torch.uint8)


@pytest.fixture
def no_memory(monkeypatch):
    """Let the system have no free memory."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)


@pytest.mark.usefixtures("nothing_kept", "no_memory")
def test_allocation_without_free_memory_raises():
    with pytest.raises(SharedMemoryError, match="no memory is left; free memory or raise the limit"):
        asyncdist.empty(1000)


def test_without_shared_memory_tensors_are_ordinary(monkeypatch, caplog):
    monkeypatch.setattr(registered, "unavailable", lambda: "no memfd here")
    monkeypatch.setattr(registered, "_warned", False)
    with caplog.at_level(logging.WARNING, logger="asyncdist"):
        tensors = [asyncdist.empty(2, 3, dtype=torch.int16, requires_grad=False) for _ in range(3)]
    assert [tensor.shape for tensor in tensors] == [(2, 3)] * 3
    assert not any(is_registered(tensor) for tensor in tensors)
    assert [record.getMessage() for record in caplog.records] == [
        "this process has no shared memory, so registered tensors are ordinary tensors: no memfd here"
    ]


def test_forked_child_does_not_free_its_parents_memory():
    tensor = asyncdist.empty(2 << 20, dtype=torch.uint8)
    tensor.fill_(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of the threads that torch has
        child = os.fork()
    if child == 0:
        try:
            del tensor
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert tensor.unique().tolist() == [5]


# -- register -------------------------------------------------------------------------------------


MOVED = {
    **{
        str(dtype): torch.arange(24).remainder(2).to(dtype).view(2, 3, 4)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    },
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(5, 7).t(),
    "slice": torch.randn(40)[3:30:2],
    "expanded": torch.randn(3, 1).expand(3, 4),
}


@pytest.mark.parametrize("tensor", MOVED.values(), ids=MOVED)
def test_register_moves_a_tensor_in_place_and_keeps_its_strides(tensor):
    before, values = (tensor.shape, tensor.stride()), tensor.clone()
    assert register(tensor) is tensor
    assert is_registered(tensor)
    assert (tensor.shape, tensor.stride()) == before
    assert torch.equal(tensor, values)


def test_register_leaves_registered_tensors(nothing_kept):
    tensor = asyncdist.empty(10)
    used, address = arena().used_nbytes, tensor.data_ptr()
    register(tensor)
    register(tensor[2:])
    assert (arena().used_nbytes, tensor.data_ptr()) == (used, address)
    register(torch.empty(0))
    register(torch.nn.ReLU())
    del tensor
    assert arena().used_nbytes == nothing_kept


class Tied(torch.nn.Module):
    """Two layers of one weight, a view into a parameter as a buffer, and buffers of other dtypes."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.second = torch.nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(6)
        self.register_buffer("row", self.first.weight.detach()[3])
        self.register_buffer("mask", torch.ones(5, dtype=torch.float16))

    def forward(self, inputs):
        return self.norm(self.second(self.first(inputs)))


def train(pairs, inputs):
    for module, optimizer in pairs:
        module(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_register_keeps_tied_parameters_and_optimizers(nothing_kept):
    module = Tied()
    twin = copy.deepcopy(module)
    pairs = [(each, torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)) for each in (module, twin)]
    inputs = torch.randn(8, 6)

    train(pairs, inputs)
    parameters = list(module.parameters())
    assert register(module) is module
    assert all(is_registered(tensor) for tensor in (*module.parameters(), *module.buffers()))
    assert arena().used_nbytes == nothing_kept + PAGE_NBYTES  # one block for all of them
    train(pairs, inputs)
    assert [id(each) for each in module.parameters()] == [id(each) for each in parameters]
    assert all(each.is_leaf and each.requires_grad for each in parameters)
    assert module.second.weight is module.first.weight
    assert torch.equal(module.row, module.first.weight[3])
    state, expected = module.state_dict(), twin.state_dict()
    expected["row"] = twin.first.weight[3]  # a copied module has lost this tie
    assert all(torch.equal(state[name], expected[name]) for name in state)
    del module, parameters, pairs, state
    gc.collect()
    assert arena().used_nbytes == nothing_kept


def test_saved_parameter_does_not_include_the_others():
    module = register(torch.nn.Linear(1000, 1000))
    file = io.BytesIO()
    torch.save(module.bias, file)
    assert file.tell() < 20_000


def test_register_keeps_inference_tensors():
    with torch.inference_mode():
        tensor = torch.arange(5.0)
    register(tensor)
    assert is_registered(tensor)
    assert tensor.is_inference()
    assert tensor.tolist() == [0, 1, 2, 3, 4]


class DTensor(torch.Tensor):
    """A tensor without memory of its own, as torch's DTensor is."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


WRAPPER = torch.Tensor._make_wrapper_subclass(DTensor, (3,), dtype=torch.float32)


@pytest.mark.parametrize(
    ("target", "error", "said"),
    [
        (torch.eye(3).to_sparse(), UnsupportedError, "call .to_dense"),
        (torch.empty(3, device="meta"), UnsupportedError, "it has no values"),
        (torch.nn.Linear(2, 2, device="meta"), UnsupportedError, "it has no values"),
        (torch.ones(3, dtype=torch.complex64).conj(), UnsupportedError, "call .resolve_conj"),
        (WRAPPER, UnsupportedError, "a DTensor has no memory of its own: .*full_tensor"),
        (torch.nn.LazyLinear(3), UsageError, "run one forward"),
        ([1, 2], UsageError, "a tensor or a module, not list"),
    ],
    ids=["sparse", "elsewhere", "module elsewhere", "conjugate", "wrapper", "lazy", "list"],
)
@pytest.mark.parametrize("wanted", [True, False])
def test_unsupported_tensors_are_refused(target, error, said, wanted):
    with pytest.raises(error, match=said):
        register(target, wanted=wanted)


@pytest.mark.usefixtures("nothing_kept", "no_memory")
def test_module_that_does_not_fit_is_unchanged():
    module = torch.nn.Linear(3, 3)
    before = [(each.data_ptr(), each.clone()) for each in module.parameters()]
    with pytest.raises(SharedMemoryError, match="no memory is left"):
        register(module)
    for each, (address, values) in zip(module.parameters(), before, strict=True):
        assert each.data_ptr() == address
        assert torch.equal(each, values)


@pytest.mark.parametrize("transport", ["shm", "inproc"])
def test_group_register_needs_shared_memory(transport):
    def program(group):
        tensor = torch.full((20_000,), float(group.rank() + 1))
        assert group.register(tensor) is tensor
        group.all_reduce(tensor, background=False).wait()
        with pytest.raises(UnsupportedError):
            group.register(torch.eye(2).to_sparse())
        return group.shares_memory, is_registered(tensor), tensor.unique().tolist()

    expected = (transport == "shm", transport == "shm", [3.0])
    assert run_ranks(2, program, transport=transport) == [expected] * 2
