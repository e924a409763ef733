"""torch's own client, process groups and torchrun on a store daemon.

The daemon is a process of its own, because torch's client holds the interpreter's lock while it waits for some replies.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from asyncdist.store import TCPStore
from tests.support.daemon import started

pytestmark = pytest.mark.processes

LONG = 60.0
PATIENT, SHORT = timedelta(seconds=20), timedelta(milliseconds=50)


@contextmanager
def daemon() -> Iterator[int]:
    with started("--port", "0") as daemon:
        yield daemon.port
        code, said = daemon.stop()
        assert code == 0
        assert "Traceback" not in said


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with daemon() as port:
        yield port


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A prefix for this test, because the tests share the daemon."""
    return str(request.node.name)


@pytest.fixture(params=["plain", "prefixed twice"])
def connect(request: pytest.FixtureRequest, port: int, name: str) -> Callable[[], dist.Store]:
    def connect() -> dist.Store:
        client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=PATIENT)
        if request.param == "plain":
            for key in client.list_keys():
                client.delete_key(key)
            return client
        return dist.PrefixStore("outer", dist.PrefixStore(name, client))

    return connect


def in_thread(call: Callable[[], object]) -> Callable[[], object]:
    """Start a call that waits in a thread; return a function that returns its result."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()

    def finish() -> object:
        thread.join(LONG)
        return results[0]

    return finish


def done(store: dist.Store) -> None:
    """Wait until the server has executed the writes of this client, which have no replies."""
    store.num_keys()


def test_values(connect):
    one, other = connect(), connect()
    one.set("k", "v")
    assert other.get("k") == b"v"
    assert other.check(["k"])
    assert not other.check(["k", "l"])
    one.append("k", "w")
    one.append("new", "x")
    assert other.multi_get(["k", "new"]) == [b"vw", b"x"]
    other.multi_set(["a", "b"], ["1", "2"])
    assert one.multi_get(["b", "a", "b"]) == [b"2", b"1", b"2"]
    assert one.delete_key("a")
    assert not one.delete_key("a")
    assert not other.check(["a"])
    one.set("empty", "")
    assert other.get("empty") == b""


def test_keys(connect):
    one, other = connect(), connect()
    before = other.num_keys()
    one.multi_set(["a", "ä/ö", "b"], ["", "", ""])
    done(one)
    assert sorted(other.list_keys()) == ["a", "b", "ä/ö"]
    assert other.num_keys() == before + 3


def test_queues(connect):
    one, other = connect(), connect()
    with pytest.raises(dist.QueueEmptyError):
        one.queue_pop("q", block=False)
    for item in ("1", "", "3"):
        one.queue_push("q", item)
    done(one)
    assert other.queue_len("q") == 3
    assert [other.queue_pop("q"), one.queue_pop("q", block=False), other.queue_pop("q")] == [b"1", b"", b"3"]
    popped = in_thread(lambda: other.queue_pop("q"))
    one.queue_push("q", "4")
    assert popped() == b"4"
    assert one.queue_len("q") == 0


def test_waits(connect):
    one, other = connect(), connect()
    got = in_thread(lambda: other.get("k"))
    one.set("k", "v")
    assert got() == b"v"
    waited = in_thread(lambda: other.wait(["x", "y"], PATIENT))
    one.multi_set(["x", "y"], ["", ""])
    assert waited() is None
    with pytest.raises(dist.DistStoreError, match="timeout"):
        one.wait(["x", "never"], SHORT)
    one.set("never", "now")
    one.wait(["x", "never"], PATIENT)
    assert one.get("never") == b"now"  # the cancelled wait has left nothing


def test_barriers(connect):
    one, other = connect(), connect()
    with pytest.raises(dist.DistStoreError, match="timeout"):
        one.barrier("b", 2, SHORT)
    passed = in_thread(lambda: other.barrier("b", 2, PATIENT))
    one.barrier("b", 2, PATIENT)
    assert passed() is None
    one.barrier("b", 2, PATIENT)  # it stays open


def test_large_values(connect):
    one, other = connect(), connect()
    value = os.urandom(20 << 20)
    one.set("k", value)
    assert other.get("k") == value
    other.multi_set([f"part {number}" for number in range(1000)], [value[:5000]] * 1000)
    assert one.multi_get([f"part {number}" for number in range(1000)]) == [value[:5000]] * 1000


def test_both_clients_see_the_same_keys(port, name):
    theirs = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=PATIENT)
    with TCPStore("127.0.0.1", port, timeout=LONG) as ours:
        theirs.set(name, "v")
        assert ours.get(name) == b"v"
        ours.queue_push(f"{name}/q", b"item")
        assert theirs.queue_pop(f"{name}/q") == b"item"
        assert ours.add(f"{name}/n", 2) + theirs.add(f"{name}/n", 2) == 6
        popped = in_thread(lambda: ours.queue_pop(f"{name}/q"))
        theirs.queue_push(f"{name}/q", "back")
        assert popped() == b"back"
        passed = in_thread(lambda: theirs.barrier(f"{name}/b", 2, PATIENT))
        ours.barrier(f"{name}/b", 2)
        assert passed() is None
        dist.PrefixStore(name, theirs).set("p", "v")
        assert ours.get(f"{name}/p") == b"v"


WORKER = r"""
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
gathered = [None] * dist.get_world_size()
dist.all_gather_object(gathered, dist.get_rank())
dist.barrier()
sys.stdout.write(f"sum {tensor.tolist()} {gathered}\n")  # in one piece: others write to the same pipe
sys.stdout.flush()
dist.destroy_process_group()
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


@pytest.mark.exhaustive
def test_gloo_group_over_env_on_a_daemon(worker):
    with daemon() as port:
        environ = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, str(worker)], env={**environ, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=LONG)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert said == ["sum [3.0, 3.0, 3.0] [0, 1]\n"] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [[], ["--rdzv-conf=is_host=0"]], ids=["as it is", "is no host"])
def test_torchrun_meets_on_a_daemon(worker, options):
    with daemon() as port:
        run = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", *options),
                *("--rdzv-id=a job", str(worker)),
            ],
            capture_output=True,
            text=True,
            timeout=LONG,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.count("sum [3.0, 3.0, 3.0] [0, 1]") == 2
        with TCPStore("127.0.0.1", port, timeout=LONG) as store:
            assert any("a job" in key for key in store.list_keys())  # the rendezvous was in our store
