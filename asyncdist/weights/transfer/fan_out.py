"""From which process a reader copies a version: hosts form a chain, in the order in which they began to read. No I/O.

A host passes each block on as soon as it has it, so all hosts of a chain have the version soon after the first one, and
each sends it once. The processes of one host share one copy. A process waits only for one that began earlier, or copies
from one that has all; so no two wait for each other. If a source dies or stalls, its reader goes on with the next
source from the block that it lacks.

With more hosts than blocks, a chain would take longer than a tree in which each host has two readers: host i of the
chain takes i block times longer than the first, host i of the tree as long as the first again. So the hosts behind that
point form a tree.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from asyncdist.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """A record at the store, as JSON. A derived class has the fields."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the record that `encode` has written. Raises ProtocolError for other bytes."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError) as cause:
            raise ProtocolError(f"a record of weights ({cls.__name__}) that cannot be read: {cause}") from cause


@dataclass(frozen=True, slots=True)
class HolderRecord(StoreRecord):
    """A process that has a version, or is reading it.

    Attributes:
        entry: The name of this record, which is new whenever the process begins to read a version.
        process: The process.
        host: Processes of one host can map each other's memory; empty if the process shares none.
        selection: The key of its selection; empty if it is all of the version.
        is_complete: Whether it has all blocks of its selection.
        address: Where it answers.
    """

    entry: str
    process: str
    host: str
    selection: str
    is_complete: bool
    address: Sequence[Any]

    def shares_with(self, other: HolderRecord) -> bool:
        """Return whether two processes can map each other's memory."""
        return bool(self.host) and self.host == other.host


def ranked_sources(
    order: Sequence[str],
    holders: Mapping[str, HolderRecord],
    own: HolderRecord,
    num_blocks: int,
    avoided: Collection[str] = (),
) -> list[HolderRecord]:
    """Return the sources from which a reader may copy, best first.

    The ``order`` has the entries of all that have begun to read the version, the publisher's first, also of those that have
    ended, and ``holders`` the records of the living ones by entry. If the reader's ``own`` entry is not in the order, the
    publisher has given the version up, and the reader copies only from those that have all. Sources whose entries are
    ``avoided`` have failed this reader.
    """
    position = {entry: number for number, entry in enumerate(order)}
    place = position.get(own.entry, -1)
    present = [holders[entry] for entry in order if entry in holders]
    usable = [
        each
        for each in present
        if each.process != own.process
        and each.entry not in avoided
        # A source must have, or get, all blocks of the reader's selection in the reader's order.
        and (each.selection == own.selection or (not each.selection and each.is_complete))
        and (each.is_complete or position[each.entry] < place)
    ]
    local = [each for each in usable if each.shares_with(own)]
    local.sort(key=lambda each: (not each.is_complete, position[each.entry]))
    leaders: dict[str, HolderRecord] = {}
    for each in usable:
        if not each.shares_with(own):
            leaders.setdefault(each.host or each.entry, each)
    before = [each for each in leaders.values() if position[each.entry] < place]
    after = [each for each in leaders.values() if position[each.entry] > place]
    before.reverse()
    if len(before) > num_blocks:
        # Place len(before) of the leaders is this reader's.
        before.insert(0, before.pop(len(before) - 1 - (len(before) - 1) // 2))
    return [*local, *before, *after]
