"""Random worlds with random faults: ``python tests/chaos/chaos.py [--seconds 60] [--seed N]``. `make chaos` runs it.

The worlds have the seeds N, N + 1, …; at least one runs. A failure prints the command that repeats its world, and
leaves the story of the world and the output, stacks and flight recorder dumps of its processes in a folder.
"""

import argparse
import contextlib
import secrets
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from asyncdist.testing.hosts import Hosts, HostsUnavailableError  # noqa: E402
from benchmarks.processes import Nursery  # noqa: E402
from tests.chaos.judge import ViolationError  # noqa: E402
from tests.chaos.plan import NETWORKS, plan_of  # noqa: E402
from tests.chaos.store_world import StoreWorld  # noqa: E402
from tests.chaos.world import ChaosWorld  # noqa: E402

_STORE_EVERY = 3
"""One of so many worlds has a store whose hosts vanish, too."""
_MODULES = ("torch", "asyncdist", "asyncdist.sync", "asyncdist_transports.shm", "asyncdist_transports.tcp")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run random worlds with random faults.")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no further world begins")
    parser.add_argument("--seed", type=int, default=None, help="the seed of the first world (default: random)")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="of " + ", ".join(NETWORKS))
    parser.add_argument("--keep", type=Path, default=Path("out/chaos"), help="the folder for failures")
    parser.add_argument("--failures", type=int, default=1, help="end after so many failures")
    given = parser.parse_args()
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    with contextlib.ExitStack() as stack:
        networks, hosts = tuple(given.networks.split(",")), None
        if "hosts" in networks:
            try:
                hosts = stack.enter_context(Hosts())
                hosts.drop(0)
                hosts.restore(0)
            except HostsUnavailableError as reason:
                print(f"no worlds on two hosts: {reason.summary}")
                hosts = None
        nursery = stack.enter_context(Nursery(_MODULES))
        return run(given, seed, networks, nursery, hosts)


def run(given: argparse.Namespace, seed: int, networks: tuple[str, ...], nursery: Nursery, hosts: Hosts | None) -> int:
    """Run worlds until the time is over; return the number of failures."""
    faults: Counter[str] = Counter()
    worlds, skipped, failures, until = 0, 0, 0, time.monotonic() + given.seconds
    done: Counter[str] = Counter()
    while True:
        plan = plan_of(seed, networks)
        if plan.network == "hosts" and hosts is None:
            skipped += 1
        else:
            print(f"{worlds + 1:4d}  {plan}", flush=True)
            world = ChaosWorld(plan, nursery, hosts, given.keep / str(seed))
            store = StoreWorld(seed)
            try:
                if seed % _STORE_EVERY == 0:
                    store.run()
                world.run()
            except ViolationError as violation:
                failures += 1
                print(
                    f"\nFAILED: {violation}\nsee {given.keep / str(seed)}; to repeat this world: {repeat(given, seed)}\n"
                )
                if failures >= given.failures:
                    break
            else:
                faults.update(world.done + store.faults)
            worlds += 1
            done.update(
                {
                    "rounds": world.rounds, "remote calls": world.calls, "failed calls": world.failed_calls,
                    "versions read": world.versions, "calls of stores": store.num_calls,
                }
            )  # fmt: skip
        seed += 1
        if time.monotonic() > until and worlds:
            break
    by_kind = ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items()))
    what = ", ".join(f"{count} {kind}" for kind, count in done.items())
    print(f"{worlds} worlds, {what}; {faults.total()} faults: {by_kind}")
    if skipped:
        print(f"{skipped} worlds were skipped, because they need two hosts")
    return min(failures, 1)


def repeat(given: argparse.Namespace, seed: int) -> str:
    """Return the command that runs one world again."""
    if given.networks == ",".join(NETWORKS):
        return f"make chaos SECONDS=0 SEED={seed}"
    return f"python tests/chaos/chaos.py --seconds 0 --networks {given.networks} --seed {seed}"


if __name__ == "__main__":
    sys.exit(main())
