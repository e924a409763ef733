"""Groups that a group makes of its own members."""

import asyncio

import pytest
import torch

import asyncdist
import asyncdist.sync
from asyncdist.errors import NotInitializedError, UsageError
from asyncdist.testing.cluster import world_of
from tests.support.ranks import sums

APART = asyncdist.GroupMember.NON_GROUP_MEMBER


async def test_subgroup_of_a_subgroup_communicates_and_keeps_global_ranks():
    async with world_of(4) as groups:
        upper = [group.new_group([3, 1, 2]) for group in groups]
        assert upper[0] is APART
        assert [group.ranks for group in upper[1:]] == [(1, 2, 3)] * 3
        outer = [group.new_group([2, 0], sort_ranks=False) for group in upper[1:]]
        assert outer[1] is APART
        assert outer[0].ranks == outer[2].ranks == (3, 1)
        assert await sums([outer[0], outer[2]]) == [4.0] * 2
        assert outer[0].rank() == 1


async def test_subgroups_divide_a_group():
    async with world_of(4) as groups:
        upper = [group.new_group([1, 2, 3], sort_ranks=False) for group in groups[1:]]
        singles = [group.new_subgroups(1) for group in upper]
        assert [(mine.ranks, made.index(mine)) for mine, made in singles] == [((1,), 0), ((2,), 1), ((3,), 2)]
        listed = [group.new_subgroups_by_enumeration([[2, 0]]) for group in upper]
        assert [mine for mine, _ in listed][1] is APART
        assert listed[0][0].ranks == (1, 3)
        parts = [group.split_group([[2, 1]], group_desc="later") for group in upper]
        assert parts[0] is None
        assert [(part.ranks, part.name) for part in parts[1:]] == [
            ((2, 3), "later (ranks 2-3 of 'group of ranks 1-3')")
        ] * 2
        assert await sums(parts[1:]) == [5.0] * 2
        with pytest.raises(UsageError, match="group_size=2 does not divide the 3 ranks of the group"):
            upper[0].new_subgroups(2)
        with pytest.raises(UsageError, match="the subgroups overlap"):
            upper[0].split_group([[0, 1], [1]])
        with pytest.raises(UsageError, match=r"ranks=\[3\] is not a group: it needs distinct ranks from 0 to 2"):
            upper[0].new_group([3])


async def test_function_and_method_make_the_same_group(monkeypatch):
    async with world_of(2) as groups:
        monkeypatch.setattr("asyncdist.groups.default_world._world", groups[0].world)
        assert await sums([asyncdist.new_group(), groups[1].new_group()]) == [1.0] * 2


async def test_members_of_a_regrouped_group_make_subgroups_although_they_made_different_ones_before():
    async with world_of(3) as groups:
        groups[0].new_group([0, 1])
        groups[2].world.leave()
        renewed = await asyncio.gather(*(group.regroup() for group in groups[:2]))
        assert await sums([group.new_group() for group in renewed]) == [1.0] * 2


async def test_process_group_makes_subgroups():
    async with asyncdist.process_group(store=asyncdist.HashStore(), rank=0, world_size=1) as group:
        await group.new_group().barrier()
    with asyncdist.sync.process_group(store=asyncdist.HashStore(), rank=0, world_size=1) as group:
        group.split_group([[0]]).barrier(background=False)


async def test_call_without_default_group_names_the_methods_of_the_open_process_group():
    advice = (
        r"process_group\(\) has opened group 'mine', .* Pass it as group=, or call its methods, such as `group.new_"
    )
    async with asyncdist.process_group(store=asyncdist.HashStore(), rank=0, world_size=1, group_name="mine"):
        for call in (asyncdist.new_group, asyncdist.get_rank, lambda: asyncdist.all_reduce(torch.ones(1))):
            with pytest.raises(NotInitializedError, match=advice):
                call()
    with pytest.raises(NotInitializedError, match=r"^no process group: call init_process_group\(\) first"):
        asyncdist.new_group()


async def test_name_of_a_subgroup_is_unique_on_a_rank_and_equal_on_its_members():
    """The flight recorder, dumps, `asyncdist top` and metrics tell groups apart by their names."""
    async with world_of(4) as groups:
        names, all_made = [], []
        for group in groups:
            evens = group.new_group([0, 2])
            made = [evens, group.new_group([0, 2]), group.new_group([2, 0], sort_ranks=False), group.new_group()]
            made += [group.new_group(ranks, group_desc="pair") for ranks in ([0, 1], [0, 1], [0, 2], [2, 3], [3])]
            made += [group.new_group(group_desc="losses"), group.new_group(group_desc="losses")]
            if evens is not APART:
                made += [evens.new_group(), evens.new_group(group_desc="losses")]
            all_made.append([each for each in made if each is not APART])
            names.append([each.name for each in all_made[-1]])
        for own in names:
            assert len(set(own)) == len(own), own
        assert names[0] == [
            "group of ranks 0, 2", "group of ranks 0, 2 (2)", "group of ranks [2, 0]", "group of ranks 0-3",
            "pair (ranks 0-1)", "pair (ranks 0-1) (2)", "pair (ranks 0, 2)", "losses", "losses (2)",
            "group of ranks 0, 2 of 'group of ranks 0, 2'", "losses (ranks 0, 2 of 'group of ranks 0, 2')",
        ]  # fmt: skip
        same = {group.name: group.ranks for made in all_made for group in made}
        assert all(same[group.name] == group.ranks for made in all_made for group in made)
        assert repr(all_made[0][5]) == "<Group 'pair (ranks 0-1) (2)' rank 0 of 2, open>"
        first, second = all_made[0][-3], all_made[1][-1]
        assert (first.name, second.name) == ("losses (2)", "losses (2)")


async def test_subgroup_of_a_regrouped_group_has_another_name_than_one_of_the_group_before():
    async with world_of(3) as groups:
        before = groups[0].new_group([0, 1])
        groups[2].world.leave()
        renewed = await asyncio.gather(*(group.regroup() for group in groups[:2]))
        after = [group.new_group([0, 1]) for group in renewed]
        assert after[0].name == after[1].name != before.name


async def test_destroyed_group_refuses_to_make_subgroups():
    async with world_of(2) as groups:
        for group in groups:
            group.close()
        message = r"^new_group on group 'world', rank 1: the group was destroyed: make a new one"
        for call in (
            lambda: groups[1].new_group(),
            lambda: groups[1].new_subgroups(1),
            lambda: groups[1].split_group([[0, 1]]),
        ):
            with pytest.raises(NotInitializedError, match=message):
                call()
