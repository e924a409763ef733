"""Failures while threads block: cuts, a close or an abort by another thread, exceptions in the driver."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from asyncdist.errors import AsyncdistError, GroupAbortedError, GroupError, NotInitializedError, PeerLostError
from asyncdist_transports.byte_stream import Reader, Writer
from tests.support.faults import proxied_world
from tests.support.stopwatch import Stopwatch

pytestmark = pytest.mark.each_loop

SOON = 2.5


@pytest.fixture
def threads():
    with ThreadPoolExecutor(16) as pool:
        yield pool


def outcome(call, *args, **how):
    """Return the result or the error of a blocking call, and its time."""
    try:
        return call(*args, **how, background=False).result(), time.monotonic()
    except AsyncdistError as error:
        return error, time.monotonic()


def warmed(world, threads):
    """Run a barrier on all ranks."""
    list(threads.map(lambda group: group.barrier(background=False).result(), world.groups))
    return world


def test_cut_fails_every_thread_blocked_on_groups_with_the_lost_rank(threads):
    with proxied_world(3) as world:
        warmed(world, threads)
        pairs = [world.new_group([0, 1]) for _ in range(3)]
        apart = world.new_group([0, 2])
        waiting = [threads.submit(outcome, pair[0].all_reduce, torch.ones(10)) for pair in pairs]
        waiting.append(threads.submit(outcome, world.groups[0].recv, torch.ones(1), 1))
        behind = [pair[0].recv(torch.ones(1), 1, 5) for pair in pairs]
        unharmed = threads.submit(outcome, apart[0].all_reduce, torch.ones(10))
        world.proxies[1, 0].cut()
        world.proxies[0, 1].cut()
        for future in waiting:
            error, at = future.result()
            assert (type(error), error.peer) == (PeerLostError, 1)
            assert world.proxies[1, 0].since_cut.seconds(at) < SOON
        for work in behind:
            with pytest.raises(PeerLostError):
                work.wait(SOON)
        assert not unharmed.done()
        value, _ = outcome(apart[2].all_reduce, torch.ones(10))
        assert value[0] == 2.0
        assert unharmed.result()[0][0] == 2.0


def test_closing_world_releases_blocked_threads(threads, until):
    with proxied_world(2) as world:
        warmed(world, threads)
        groups = [world.groups[0], world.new_group([0, 1])[0], world.new_group([1, 0])[0]]
        waiting = [threads.submit(outcome, group.all_reduce, torch.ones(10)) for group in groups]
        other = threads.submit(outcome, world.groups[1].recv, torch.ones(1), 0)
        until(lambda: len(world.endpoints[0].operations) == 3)
        since = Stopwatch()
        world.endpoints[0].close()
        for future in waiting:
            error, at = future.result()
            assert isinstance(error, GroupAbortedError | NotInitializedError)
            assert since.seconds(at) < SOON
        error, at = other.result()
        assert isinstance(error, PeerLostError)
        assert since.seconds(at) < SOON


def test_abort_from_another_thread_releases_blocked_thread(threads, until):
    with proxied_world(2) as world:
        warmed(world, threads)
        waiting = [threads.submit(outcome, group.recv, torch.ones(1), 1 - group.rank()) for group in world.groups]
        until(lambda: all(endpoint.operations for endpoint in world.endpoints))
        world.groups[1].abort("enough")
        for future in waiting:
            error, _ = future.result()
            assert isinstance(error, GroupAbortedError)
            assert "rank 1 aborted: enough" in str(error)


@pytest.mark.parametrize("where", [Writer, Reader], ids=["writing", "reading"])
@pytest.mark.parametrize("cause", [KeyboardInterrupt, ZeroDivisionError], ids=["interrupt", "bug"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_exception_in_the_driver_fails_the_rank_and_is_reported(threads, monkeypatch, where, cause):
    """How many bytes were moved is unknown, so the rank closes its connections."""
    with proxied_world(2, timeout=20) as world:
        warmed(world, threads)
        blocked = threads.submit(outcome, world.groups[1].all_reduce, torch.ones(3_000_000))
        thread = threading.get_ident()
        name = "flush" if where is Writer else "read"
        move = getattr(where, name)
        left = [3]

        def fail_third_time(self, *args):
            if threading.get_ident() == thread:
                left[0] -= 1
                if left[0] == 0:
                    raise cause
            return move(self, *args)

        monkeypatch.setattr(where, name, fail_third_time)
        since = Stopwatch()
        with pytest.raises(cause):
            world.groups[0].all_reduce(torch.ones(3_000_000), background=False).result()
        error, at = blocked.result()
        assert (type(error), error.peer) == (PeerLostError, 0)
        assert since.seconds(at) < SOON
        with pytest.raises(GroupAbortedError, match=cause.__name__):
            world.groups[0].barrier(background=False).result()


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(3, 20))]
)
def test_random_cuts_end_operations_with_correct_value_or_error(threads, monkeypatch, seed):
    """Random collectives of three blocking ranks, a random connection cut at a random byte."""
    monkeypatch.setattr("asyncdist.kernel.engine.group_failures.GRACE", 0.05)
    chance = random.Random(seed)
    with proxied_world(3, timeout=30) as world:
        calls = [chance.choice(["all_reduce", "barrier", "broadcast", "all_gather"]) for _ in range(40)]
        counts = [chance.choice([1, 10, 5_000, 200_000]) for _ in calls]
        proxy = world.proxies[chance.choice(sorted(world.proxies))]
        proxy.cut_after(chance.choice([chance.randrange(1, 200), chance.randrange(200, 3_000_000)]))

        def program(group):
            for call, count in zip(calls, counts, strict=True):
                tensor = torch.full((count,), group.rank() + 1.0)
                if call == "all_reduce":
                    group.all_reduce(tensor, background=False).result()
                    assert torch.equal(tensor, torch.full((count,), 6.0))
                elif call == "broadcast":
                    group.broadcast(tensor, 1, background=False).result()
                    assert torch.equal(tensor, torch.full((count,), 2.0))
                elif call == "all_gather":
                    outputs = [torch.empty(count) for _ in range(3)]
                    group.all_gather(outputs, tensor, background=False).result()
                    assert [output[-1].item() for output in outputs] == [1.0, 2.0, 3.0]
                else:
                    group.barrier(background=False).result()

        futures = [threads.submit(program, group) for group in world.groups]
        errors = [future.exception(timeout=25) for future in futures]
        assert all(error is None or isinstance(error, GroupError) for error in errors), errors
        if any(errors):
            assert proxy.since_cut.seconds() < SOON
