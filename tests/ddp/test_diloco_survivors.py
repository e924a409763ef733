"""Members of low-communication training that are killed: the survivors take the same outer steps without them."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).parent / "program_diloco.py"


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("compress", ["int8", pytest.param(None, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.exhaustive)])
def test_survivors_of_a_kill_repeat_the_exchange(nursery, tmp_path, transport, compress, victim):
    where = f"file://{tmp_path}/world"
    members = [nursery.start(PROGRAM, "member", rank, where, transport, compress) for rank in range(3)]
    assert [each.hear() for each in members] == [((0, 1, 2), 3)] * 3
    for each in members:
        each.say(None)
    assert [each.hear() for each in members] == [((0, 1, 2), 5)] * 3
    # The others go on to the next exchange, which they cannot complete with this member.
    dead = members.pop(victim)
    dead.kill()
    assert dead.wait() == -9
    ids = tuple(rank for rank in range(3) if rank != victim)
    for inner_steps in (7, 9, 11):
        for each in members:
            each.say(None)
        assert [each.hear() for each in members] == [(ids, inner_steps)] * 2
    # Both stop at the same inner step, and exchange all fragments for the last time.
    for each in members:
        each.say(12)
    one, other = [each.hear() for each in members]
    assert one == other
    assert one[0] == ids
    assert [each.wait() for each in members] == [0, 0]
