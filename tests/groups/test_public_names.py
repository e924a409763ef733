"""The public names of the package: those of torch.distributed, with its arguments."""

import asyncio
import importlib
import inspect
from types import ModuleType

import pytest
import torch
import torch.distributed
import torch.testing._internal.distributed.fake_pg  # a back end for one process

import asyncdist
import asyncdist.sync
from asyncdist import DistributedDataParallel, get_rank
from asyncdist.errors import NotInitializedError, UsageError
from asyncdist.testing.cluster import world_of

TORCHS = [
    name for name in asyncdist.sync.__all__
    if inspect.isfunction(getattr(torch.distributed, name, None)) and not name.startswith("is_")
]  # fmt: skip
LATER = {
    "timeout", "use_batch", "sort_ranks", "backend", "group_desc", "device_id", "group_src", "group_dst", "weights_only",
    "enable_reconfigure",
}  # fmt: skip
"""Arguments that the oldest supported torch may lack."""


@pytest.mark.parametrize("api", [asyncdist, asyncdist.sync], ids=["awaited", "blocking"])
@pytest.mark.parametrize("name", TORCHS)
def test_call_takes_the_arguments_of_torch_in_order(name, api):
    torch_names = [
        one for one in inspect.signature(getattr(torch.distributed, name)).parameters if not one.startswith("_")
    ]
    names = list(inspect.signature(getattr(api, name)).parameters)
    assert names[: len(torch_names)] == torch_names
    assert set(names) <= {*torch_names, *LATER}


async def test_enable_reconfigure_is_refused():
    for begin in (asyncdist.init_process_group, asyncdist.sync.init_process_group):
        with pytest.raises(
            UsageError, match=r"Leave enable_reconfigure out; .* call destroy_process_group\(\) and init_process_group"
        ):
            await begin(store=asyncdist.HashStore(), rank=0, world_size=1, enable_reconfigure=True)
    assert not asyncdist.is_initialized()


def test_both_apis_have_the_same_names():
    of_the_package = {"Config", "__version__"}
    assert set(asyncdist.__all__) - of_the_package == set(asyncdist.sync.__all__)


def test_node_local_rank_is_that_of_the_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert asyncdist.get_node_local_rank(fallback_rank=3) == 3
    with pytest.raises(UsageError, match="LOCAL_RANK is not set"):
        asyncdist.get_node_local_rank()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert asyncdist.get_node_local_rank(fallback_rank=3) == 1


def test_availability_queries(monkeypatch):
    assert asyncdist.is_gloo_available() == torch.distributed.is_gloo_available()
    assert asyncdist.is_nccl_available() == torch.distributed.is_nccl_available()
    assert asyncdist.is_mpi_available() == torch.distributed.is_mpi_available()
    assert [asyncdist.is_backend_available(name) for name in ("gloo", "TCP", "shm", "smoke")] == [True] * 3 + [False]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert asyncdist.is_torchelastic_launched()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not asyncdist.is_torchelastic_launched()


async def test_new_group_sorts_ranks_unless_sort_ranks_is_false(monkeypatch):
    async with world_of(4) as groups:
        monkeypatch.setattr("asyncdist.groups.default_world._world", groups[3].world)
        assert asyncdist.new_group([3, 0, 2]).ranks == (0, 2, 3)
        backwards = asyncdist.new_group([3, 0, 2], sort_ranks=False)
        assert backwards.ranks == (3, 0, 2)
        assert asyncdist.new_subgroups_by_enumeration([[3, 1], [2, 0]])[0].ranks == (1, 3)
        assert asyncdist.split_group(backwards, [[2, 0], [1]]).ranks == (3, 2)


PREPARED = """
    all_gather all_gather_coalesced all_gather_single all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier
    broadcast gather gather_single reduce reduce_scatter reduce_scatter_single scatter
"""
GROUP = set(
    """
    abort adopt agree all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single
    all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast
    broadcast_object_list close error gather gather_into_tensor gather_object gather_single group_rank irecv isend
    monitored_barrier new_group new_subgroups new_subgroups_by_enumeration new_window rank recv recv_object_list reduce
    reduce_scatter reduce_scatter_single reduce_scatter_tensor register register_hook regroup revoke scatter
    scatter_object_list send send_object_list set_timeout shares_memory size split_group step watch_members
    """.split()
)
GROUP |= {f"{name}_init" for name in PREPARED.split()}
GROUP_ATTRIBUTES = {"changed", "generation", "hooks", "member_ids", "name", "ranks", "timeout"}


def public(names):
    return {name for name in names if not name.startswith("_")}


async def test_group_shows_documented_names_only():
    assert public(dir(asyncdist.Group)) == GROUP
    assert [name for name in GROUP if not inspect.getdoc(getattr(asyncdist.Group, name))] == []
    documented = "\n".join(inspect.getdoc(owner) for owner in asyncdist.Group.__mro__[:-1] if owner.__doc__)
    assert [name for name in GROUP_ATTRIBUTES if f"    {name}: " not in documented] == []
    async with world_of(1) as (group,):
        assert public(dir(group)) == GROUP | GROUP_ATTRIBUTES


def test_group_has_the_collectives_of_the_package():
    functions = {name for name in asyncdist.__all__ if inspect.ismethod(getattr(asyncdist, name))}
    assert "all_gather_into_tensor" in functions
    made = {"new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"}
    assert functions | made <= GROUP


async def test_batch_of_a_group_takes_ranks_in_that_group():
    async with world_of(3) as groups:
        pair = [group.new_group([1, 2]) for group in groups[1:]]
        sent, received = torch.ones(2), [torch.zeros(2), torch.zeros(2)]
        for group, into in zip(pair, received, strict=True):
            peer = 1 - group.rank()
            ops = [asyncdist.P2POp(group.isend, sent, peer), asyncdist.P2POp(group.irecv, into, group_peer=peer)]
            last = group.batch_isend_irecv(ops)
        await asyncio.gather(*last)
        assert [into.sum().item() for into in received] == [2.0, 2.0]
        with pytest.raises(UsageError, match=r"of group 'world' takes a list of P2POp of this group"):
            groups[1].batch_isend_irecv([asyncdist.P2POp(pair[0].isend, sent, 1)])
        with pytest.raises(UsageError, match="this is the isend of group 'group of ranks"):
            asyncdist.P2POp(pair[0].isend, sent, 1, group=groups[1])


def test_submodules_do_not_hide_public_names():
    for name in ("asyncdist.groups.group", "asyncdist.kernel.memory.reduce_kernels", "asyncdist.store"):
        assert isinstance(importlib.import_module(name), ModuleType)
    hidden = [name for name in asyncdist.__all__ if isinstance(getattr(asyncdist, name), ModuleType)]
    assert hidden == []
    assert asyncdist.group.WORLD is None
    assert callable(asyncdist.reduce)


def test_package_is_a_plain_module_that_cloudpickle_can_send():
    assert type(asyncdist) is ModuleType


@pytest.fixture
def torch_group():
    """The default group of torch.distributed, while asyncdist has none."""
    torch.distributed.init_process_group("fake", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_process_group_of_torch_is_refused_with_advice(torch_group):
    model = torch.nn.Linear(1, 1)
    for call in (lambda: DistributedDataParallel(model), asyncdist.new_group, asyncdist.sync.barrier):
        with pytest.raises(NotInitializedError, match=r"only torch.distributed has one: call asyncdist.sync.init_pro"):
            call()
    for call in (lambda: DistributedDataParallel(model, process_group=torch_group), lambda: get_rank(torch_group)):
        with pytest.raises(UsageError, match=r"a process group of torch.distributed, not of asyncdist: if it"):
            call()
