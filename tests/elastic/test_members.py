"""Jobs of real processes, which are killed and replaced while they train."""

from pathlib import Path

import pytest

from asyncdist.base.background_loop import background_loop
from asyncdist.config import Config
from asyncdist.kernel.tracing.job_status import job_status
from asyncdist.status.viewer import JobViewer
from asyncdist.store import StoreServer
from benchmarks import laboratory

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).parent / "program_member.py"


@pytest.fixture
def job():
    server = background_loop().run(StoreServer.start("127.0.0.1", 0))
    try:
        yield f"asyncdist://127.0.0.1:{server.port}/job"
    finally:
        background_loop().run(server.close())


@pytest.fixture(params=["shm", pytest.param("tcp", marks=pytest.mark.exhaustive)])
def transport(request):
    return request.param


def start(nursery, job, transport, min_size=1, start_size=1, **environment):
    environment["ASYNCDIST_TRANSPORT"] = transport
    return nursery.start(PROGRAM, "member", job, min_size, start_size, environment=environment)


def hear(process, kind):
    """Return the next report of a kind."""
    while (said := process.hear())[0] != kind:
        pass
    return said


def founders(nursery, job, transport, count, min_size, **environment):
    """Start the first members; return once all of them train."""
    members = [start(nursery, job, transport, min_size, count, **environment) for _ in range(count)]
    for each in members:
        assert hear(each, "generation")[1] == count
        hear(each, "step")
    return members


def finish(members):
    """Let the members end after a step that all of them commit, and compare their models."""
    members[0].say("end")
    _, step, sums = hear(members[0], "done")
    assert step >= 5
    assert all(hear(each, "done")[1:] == (step, sums) for each in members[1:])
    assert [each.wait() for each in members] == [0] * len(members)


@pytest.mark.parametrize("victim", [0, 2], ids=["the lowest rank", "the highest rank"])
def test_survivors_continue_after_a_kill(nursery, job, transport, victim):
    members = founders(nursery, job, transport, 3, 1)
    members.pop(victim).kill()
    for each in members:
        assert hear(each, "generation")[1:3] == (2, False)
    finish(members)


def test_replacement_gets_the_state_of_the_survivors(nursery, job, transport):
    members = founders(nursery, job, transport, 3, 2)
    members.pop().kill()
    members.append(start(nursery, job, transport))
    kind, size, received, step = hear(members[-1], "generation")
    assert (kind, size, received) == ("generation", 3, True)
    assert step >= 5
    finish(members)


def test_members_wait_for_a_newcomer_if_too_few_are_left(nursery, job, transport):
    members = founders(nursery, job, transport, 2, 2)
    members.pop().kill()
    members.append(start(nursery, job, transport, 2, 2))
    assert hear(members[-1], "generation")[1:3] == (2, True)
    finish(members)


def test_members_and_their_store_that_are_stopped_together_go_on_in_the_same_generation(nursery, job, transport):
    """As if their machine had been suspended, for longer than leases and heartbeats. Another job is the clock."""
    store = nursery.start(laboratory.__file__, "serve_store", "127.0.0.1")
    own = f"asyncdist://127.0.0.1:{store.hear()}/job"
    members = founders(nursery, own, transport, 3, 1, ASYNCDIST_HEARTBEAT="0.5")
    watcher, _, alone = founders(nursery, job, transport, 3, 1, ASYNCDIST_HEARTBEAT="3")
    for each in (*members, store, alone):
        each.stop()
    assert hear(watcher, "generation")[1] == 2
    for each in (store, *members):
        each.resume()
    members[0].say("end")
    assert [each.hear()[0] for each in members] == ["done"] * 3
    assert [each.wait() for each in members] == [0] * 3


@pytest.mark.exhaustive
def test_many_kills_and_replacements(nursery, job, transport):
    members = founders(nursery, job, transport, 4, 2)
    for turn in range(8):
        members.pop(turn % len(members)).kill()
        members.append(start(nursery, job, transport))
        hear(members[-1], "generation")
    finish(members)


@pytest.mark.exhaustive
def test_newcomer_that_is_stopped_delays_the_members_and_does_not_block_them(nursery, job, transport):
    members = founders(nursery, job, transport, 2, 1)
    stopped = start(nursery, job, transport)
    hear(stopped, "joins")
    stopped.stop()
    finish(members)
    stopped.kill()


@pytest.mark.exhaustive
def test_job_begins_anew_when_all_members_were_killed(nursery, job, transport):
    for each in founders(nursery, job, transport, 2, 2):
        each.kill()
    members = founders(nursery, job, transport, 2, 2)
    finish(members)


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1], ids=["the lowest id", "the highest id"])
def test_member_that_cannot_know_whether_the_other_has_ended_goes_on(nursery, job, victim):
    """Two hosts with one member each: one has the majority without the other, the other has to join again."""
    members = []
    for host in ("one", "two"):
        members.append(start(nursery, job, "tcp", 1, 2, ASYNCDIST_HOST=host))
        hear(members[-1], "joins")  # the first gets the lower id
    for each in members:
        hear(each, "step")
    members.pop(victim).kill()
    assert hear(members[0], "generation")[1:3] == (1, False)
    finish(members)


@pytest.mark.exhaustive
def test_top_follows_the_job_through_its_generations(nursery, job, until):
    async def ask(viewer):
        return job_status(await viewer.ask())

    def shows(members, size, generation):
        status = loop.run(ask(viewer))
        return (status.members, len(status.rows), status.generation, status.healthy) == (
            members,
            size,
            generation,
            True,
        )

    loop = background_loop()
    members = founders(nursery, job, "shm", 2, 1)
    viewer = JobViewer(job, Config(), timeout=60.0)
    try:
        until(lambda: shows(2, 2, 1))
        # Rank 0 has served the store of this world, and the viewer is connected to it.
        members.pop(0).kill()
        assert hear(members[0], "generation")[1] == 1
        until(lambda: shows(1, 2, 2))
        members.append(start(nursery, job, "shm"))
        for each in members:
            assert hear(each, "generation")[1] == 2
        until(lambda: shows(2, 2, 3))
    finally:
        loop.call(viewer.close)
    finish(members)
