"""A few random worlds; `make chaos` runs as many as there is time for."""

import contextlib
import itertools

import pytest

from asyncdist.testing.hosts import Hosts
from tests.chaos.plan import plan_of
from tests.chaos.store_world import StoreWorld
from tests.chaos.world import ChaosWorld
from tests.support.packets import needs_packet_filters

pytestmark = pytest.mark.processes


@pytest.fixture
def run(nursery, tmp_path):
    """Return a function that runs the world of a seed."""
    with contextlib.ExitStack() as stack:

        def run(seed):
            plan, hosts = plan_of(seed), None
            if plan.network == "hosts":
                hosts = stack.enter_context(Hosts())
                hosts.drop(0)
                hosts.restore(0)
            world = ChaosWorld(plan, nursery, hosts, tmp_path / "kept")
            world.run()
            return world

        yield run


def seed_of(kind, *, joins, strangers=False):
    """Return the lowest seed of a world of at most four processes that begins with a fault of a kind, which no other
    fault can prevent, with strangers if `strangers` is set."""
    return next(
        seed
        for seed in itertools.count()
        if (plan := plan_of(seed)).joins is joins
        and plan.size <= 4
        and plan.has_strangers >= strangers
        and min(plan.faults, key=lambda fault: fault.at).kind == kind
    )


_CASES = [
    ("kill", False),
    ("kill", True),
    ("drop", False),
    ("drop", True),
    ("stop", False),
    ("stop", True),
    ("callback", False),
]


@pytest.mark.parametrize(
    ("kind", "joins"), [("cut", False), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in _CASES)]
)
def test_world_with_a_fault(kind, joins, run):
    world = run(seed_of(kind, joins=joins))
    assert kind in world.done
    assert world.rounds


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["unplug", "blackhole"])
def test_world_whose_hosts_are_separated(kind, run):
    assert kind in run(seed_of(kind, joins=False)).done


@needs_packet_filters
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2])
def test_clients_outlive_a_store_whose_host_vanishes_and_names_do_not_outlive_their_hosts(seed):
    world = StoreWorld(seed)
    world.run()
    assert world.num_calls > 0


@pytest.mark.parametrize("joins", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_world_with_strangers_at_its_ports_goes_on(joins, run):
    world = run(seed_of("kill", joins=joins, strangers=True))
    assert "kill" in world.done
    assert world.strangers.num_ports >= world.plan.size
    assert world.rounds
