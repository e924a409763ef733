"""The calls of a `Group` that make groups of some of its members, without communication."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self, TypeVar, overload

from asyncdist.base.deadline import Timeout
from asyncdist.errors import UsageError
from asyncdist.kernel.collectives.arguments import list_of, whole_number_of
from asyncdist.kernel.memory.torch_compile import excluded_from_compile

G = TypeVar("G", bound="SubgroupOps")


class NonMember(enum.Enum):
    """The type of ``GroupMember.NON_GROUP_MEMBER``, which stands for a group on the ranks that are not in it.

    `new_group` returns it there. Compare with ``is``, or ask ``isinstance(made, dist.Group)``, before you call methods.
    """

    NON_GROUP_MEMBER = enum.auto()

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


@excluded_from_compile
class SubgroupOps(ABC):
    """The calls that make subgroups of a `Group`.

    Ranks in arguments are ranks in the group. The members match equal calls by their order: all members of a subgroup
    make groups of the same name and ranks from the same group equally often. The other members may leave a call out.
    """

    ranks: tuple[int, ...]

    @abstractmethod
    def size(self) -> int:
        """Return the number of ranks in this group."""

    @abstractmethod
    def _subgroup(self, ranks: Sequence[int], timeout: Timeout, name: str | None) -> Self | None:
        """Make the group of some ranks, in this order; None on the others. Raise UsageError if they are no group."""

    @abstractmethod
    def _pass_on(self, part: Self | None, number: int) -> None:
        """Split the device communicators of this group for its subgroups, of which ``number`` is this rank's."""

    @overload
    def new_group(
        self, ranks: None = None, timeout: Timeout = None, group_desc: str | None = None, *, sort_ranks: bool = True
    ) -> Self: ...

    @overload
    def new_group(
        self, ranks: Sequence[int], timeout: Timeout = None, group_desc: str | None = None, *, sort_ranks: bool = True
    ) -> Self | NonMember: ...

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        timeout: Timeout = None,
        group_desc: str | None = None,
        *,
        sort_ranks: bool = True,
    ) -> Self | NonMember:
        """Make a group of some members of this group, without communication.

        Args:
            ranks: Ranks of the members in this group; None means all of them.
            timeout: Default limit of the new group's operations, in seconds or as a timedelta; None takes the world's.
            group_desc: Name of the new group in error messages and traces, to which the ranks of the members are added if
                it has not all ranks of the world, and a number if it is another one of equal name and ranks.
            sort_ranks: Number the members by ascending global rank, as torch does. False keeps the order of ``ranks``.

        Returns:
            The group, or ``GroupMember.NON_GROUP_MEMBER`` on a rank that is not a member.

        Raises:
            NotInitializedError: This rank has left the world, or has destroyed this group.
            UsageError: ``ranks`` is empty, repeats a rank, or names a rank outside this group.

        Example:
            >>> evens = group.new_group(range(0, group.size(), 2))
        """
        members = range(self.size()) if ranks is None else list_of("ranks", ranks, "ranks")
        chosen = [whole_number_of("a rank", rank) for rank in members]
        if sort_ranks and all(0 <= rank < self.size() for rank in chosen):
            chosen.sort(key=self.ranks.__getitem__)
        return self._subgroup(chosen, timeout, group_desc) or NonMember.NON_GROUP_MEMBER

    def new_subgroups(
        self, group_size: int, timeout: Timeout = None, group_desc: str | None = None
    ) -> tuple[Self, list[Self | NonMember]]:
        """Divide this group into subgroups of ``group_size`` consecutive ranks.

        Args:
            group_size: Number of ranks of each subgroup.
            timeout: Default limit of the subgroups' operations, in seconds or as a timedelta; None takes the world's.
            group_desc: Name of the subgroups in error messages and traces.

        Returns:
            The subgroup of this rank, and the list of all subgroups as `new_group` returns them.

        Raises:
            UsageError: ``group_size`` does not divide the size of this group.

        Example:
            >>> mine, all_pairs = group.new_subgroups(2)  # ranks 0 and 1, ranks 2 and 3, ...
        """
        group_size, size = whole_number_of("group_size", group_size), self.size()
        if group_size < 1 or size % group_size:
            raise UsageError(f"group_size={group_size} does not divide the {size} ranks of the group")
        cut = [range(start, start + group_size) for start in range(0, size, group_size)]
        mine, groups = self.new_subgroups_by_enumeration(cut, timeout, group_desc)
        assert mine is not NonMember.NON_GROUP_MEMBER, "every rank is in one of them"
        return mine, groups

    def new_subgroups_by_enumeration(
        self, ranks_per_subgroup_list: Sequence[Sequence[int]], timeout: Timeout = None, group_desc: str | None = None
    ) -> tuple[Self | NonMember, list[Self | NonMember]]:
        """Make one group for each list of ranks in this group.

        Args:
            ranks_per_subgroup_list: The ranks of the members of each subgroup.
            timeout: Default limit of the subgroups' operations, in seconds or as a timedelta; None takes the world's.
            group_desc: Name of the subgroups in error messages and traces.

        Returns:
            The subgroup of this rank, and the list of all subgroups as `new_group` returns them.

        Raises:
            UsageError: Two lists contain the same rank, or a list names a rank outside this group.

        Example:
            >>> mine, both = group.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        """
        lists = _apart("the subgroups", ranks_per_subgroup_list, "ranks")
        made = [self.new_group(ranks, timeout, group_desc) for ranks in lists]
        return _own(made), made

    def split_group(
        self, split_ranks: Sequence[Sequence[int]], timeout: Timeout = None, group_desc: str | None = None
    ) -> Self | None:
        """Split this group into subgroups.

        All members call it, in the same order as their other operations. The host side needs no communication. A group
        that has carried tensors on devices may split its device communicators too.

        Args:
            split_ranks: For each subgroup, the ranks of its members. A subgroup keeps the order of this group.
            timeout: Default limit of the subgroups' operations, in seconds or as a timedelta; None takes the world's.
            group_desc: Name of the subgroups in error messages and traces.

        Returns:
            The subgroup of this rank, or None if this rank is in no subgroup.

        Raises:
            UsageError: ``split_ranks`` is empty, names a rank outside this group, or repeats a rank.

        Example:
            >>> half = group.split_group([range(group.size() // 2), range(group.size() // 2, group.size())])
        """
        lists = _apart("split_ranks", split_ranks or (), "group ranks")
        if not lists:
            raise UsageError("split_ranks needs at least one list of ranks")
        parts = [sorted(whole_number_of("a group rank", rank) for rank in ranks) for ranks in lists]
        made = [self.new_group(ranks, timeout, group_desc, sort_ranks=False) for ranks in parts]
        own = _own(made)
        part = None if isinstance(own, NonMember) else own
        self._pass_on(part, -1 if part is None else made.index(part))
        return part


def _apart(what: str, lists: Sequence[Sequence[int]], of: str) -> list[list[int]]:
    """Return the lists of ranks; raise UsageError if a rank is in two of them."""
    parts = [list_of("a subgroup", ranks, of) for ranks in list_of(what, lists, f"lists of {of.split()[-1]}")]
    named = [rank for ranks in parts for rank in ranks]
    if len(set(named)) != len(named):
        raise UsageError("the subgroups overlap: a rank may be in one of them only")
    return parts


def _own(made: Sequence[G | NonMember]) -> G | NonMember:
    return next((one for one in made if not isinstance(one, NonMember)), NonMember.NON_GROUP_MEMBER)
