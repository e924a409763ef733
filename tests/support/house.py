"""Prints the rooms of the house: each folder of `asyncdist` and each transport, with the rooms that it imports.

Run it with ``python -m tests.support.house``. The floor of a room is 1 more than the highest floor below it. An arrow
stands for all imports of one room by another. The flat modules of `asyncdist`, its surface and foundation, are no rooms.
"""

from __future__ import annotations

import functools

from tests.test_architecture import EVERYTHING, ROOT, imports


def room_of(module: str) -> str | None:
    """Return the room of a module, by its dotted name."""
    package, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    is_room = package == "asyncdist_transports" or (ROOT / package / name).is_dir()
    return f"{package.removeprefix('asyncdist').lstrip('_')}.{name}".lstrip(".") if name and is_room else None


def arrows() -> dict[str, set[str]]:
    """Return each room with those that it imports."""
    found: dict[str, set[str]] = {}
    for module, path in EVERYTHING.items():
        room = room_of(module)
        if room is not None and not module.startswith("benchmarks"):
            others = {other for imported in imports(path) if (other := room_of(imported)) is not None}
            found.setdefault(room, set()).update(others - {room})
    return found


def floors(below: dict[str, set[str]]) -> dict[str, int]:
    """Return the floor of each room. Raises RecursionError if arrows form a circle."""

    @functools.cache
    def floor(room: str) -> int:
        return 1 + max(map(floor, below[room]), default=0)

    return {room: floor(room) for room in below}


def main() -> None:
    below = arrows()
    floor = floors(below)
    for room in sorted(below, key=lambda room: (floor[room], room)):
        print(f"{floor[room]:3}  {room:24} {' '.join(sorted(below[room]))}")
    print(f"{len(below)} rooms, {max(floor.values())} floors, {sum(map(len, below.values()))} arrows")


if __name__ == "__main__":
    main()
