"""Process groups, the world they belong to, and the awaited and default-group interfaces to them.

`asyncdist` and `asyncdist.sync` export the functions; the libraries use the names below.
"""

from asyncdist.groups.default_world import AnyGroup, default_group, is_initialized, resolve_group
from asyncdist.groups.group import Group
from asyncdist.groups.members.training_state import State
from asyncdist.groups.procedure import BackgroundCall, Procedure
from asyncdist.groups.subgroups import NonMember
from asyncdist.groups.world import World, discard_world, open_world

__all__ = [
    "AnyGroup", "BackgroundCall", "Group", "NonMember", "Procedure", "State", "World", "default_group", "discard_world",
    "is_initialized", "open_world", "resolve_group",
]  # fmt: skip
