"""A store and its clients on hosts whose links go down: no packet says that the other side has gone."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes
PORT = "29511"
_CLIENT = """
import asyncio, sys
from asyncdist.store import AsyncStore

async def main(host):
    async with await AsyncStore.connect(host, 29511, timeout=60.0) as store:
        await store.set("name", "present", ephemeral=True)
        watching = await store.watch("watched")
        for number in range(1, 1_000_000):
            await store.set("n", str(number))  # other changes would end with the lease: their outcome is unknown
            print(number, flush=True)
            await asyncio.sleep(0.01)

asyncio.run(main(sys.argv[1]))
"""
_OBSERVER = """
import asyncio, sys
from asyncdist.store import AsyncStore

async def main(host):
    async with await AsyncStore.connect(host, 29511, timeout=60.0) as store, store.watch("name") as values:
        print(await anext(values), flush=True)
        sys.stdin.readline()
        await store.set("watched", "changed")
        print(await anext(values), flush=True)
        print(await anext(values), flush=True)

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def start(hosts):
    """Return a function that starts a program on a host; the end of the test kills it."""
    started = []

    def start(host, *command):
        settings = {
            "ASYNCDIST_TOKEN": "for this test only", "ASYNCDIST_HEARTBEAT": "1", "ASYNCDIST_STORE_LEASE": "1",
        }  # fmt: skip
        started.append(
            subprocess.Popen(
                hosts.command(host, sys.executable, *command), env={**hosts.environment(host), **settings}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_names_of_a_vanished_host_end_and_its_client_continues_when_it_is_back(hosts, start):
    address = hosts.addresses[0]
    store = start(0, "-m", "asyncdist.cli", "store", "--host", address, "--port", PORT)
    assert "ready" in store.stdout.readline()
    client = start(1, "-c", _CLIENT, address)
    assert client.stdout.readline() == "1\n"
    observer = start(0, "-c", _OBSERVER, address)
    assert observer.stdout.readline() == "b'present'\n"
    hosts.cut(1)
    print(file=observer.stdin, flush=True)
    # Without a limit of its own TCP would try for a quarter of an hour.
    assert observer.stdout.readline() == "None\n"
    hosts.restore(1)
    assert observer.stdout.readline() == "b'present'\n"
