"""torchrun and ``asyncdist://`` jobs at a store daemon: started, restarted and grown."""

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from asyncdist.config import Config
from asyncdist.net.network import is_loopback
from asyncdist.rendezvous.addresses import outward
from asyncdist.torchrun import handler
from tests.support.daemon import started

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent
AT_DAEMON, WORKER = HERE / "program_at_daemon.py", HERE / "program_under_torchrun.py"
LIMIT = 90
ELASTIC = ("--nnodes=1:4", "--nproc-per-node=1", "--rdzv-id=job", "--monitor-interval=0.2")


class Agent:
    """A torchrun agent, started with these arguments, and the output of the agent and its workers."""

    def __init__(self, *arguments):
        command = [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines = []
        self.changed = threading.Condition()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(line.strip())
                self.changed.notify_all()

    def wait_for_output(self, text, after=0):
        """Wait until the agent or a worker has printed this text behind the first lines; return the number of lines."""

        def number():
            return next((n for n, line in enumerate(self.lines, 1) if n > after and text in line), 0)

        with self.changed:
            assert self.changed.wait_for(number, LIMIT), "\n".join(self.lines)
            return number()

    def kill_with_workers(self):
        """Kill the agent, then its workers; a living agent would restart them."""
        workers = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.process.kill()
        for worker in workers:
            os.kill(int(worker), signal.SIGKILL)

    def output_of_workers(self):
        """Return what the workers printed after the job has ended with status 0."""
        self.reader.join(LIMIT)
        assert self.process.wait(LIMIT) == 0, "\n".join(self.lines)
        return sorted(line for line in self.lines if re.match(r"\w+: rank", line))


def at(daemon):
    """Return torchrun's options for a daemon."""
    return "--rdzv-backend=asyncdist", f"--rdzv-endpoint=127.0.0.1:{daemon.port}"


def job(daemon, backend, ending, *options):
    return agent(*at(daemon), *options, WORKER, backend, ending)


@contextmanager
def agent(*arguments):
    started = Agent(*arguments)
    try:
        yield started
    finally:
        started.process.kill()
        started.reader.join(LIMIT)
        started.process.communicate()


@pytest.fixture
def nothing_is_kept(daemon, until):
    """Return a function that waits until the daemon holds no key."""

    def nothing_is_kept():
        with daemon.client() as store:
            until(lambda: store.num_keys() == 0)

    return nothing_is_kept


@pytest.mark.parametrize("backend", ["asyncdist", pytest.param("gloo", marks=pytest.mark.exhaustive)])
def test_workers_restarted_by_torchrun_find_an_empty_store(daemon, run_python, backend):
    """gloo needs it as well: its ranks read stale addresses from a store that was used before."""
    options = (*at(daemon), "--nproc-per-node=2", "--max-restarts=1", "--start-method=fork", "--run-path")
    status, output = run_python("-m", "torch.distributed.run", *options, WORKER, backend, "fails once")
    assert status == 0, output
    assert sorted(line for line in output.splitlines() if re.match(r"\w+: rank", line)) == [
        f"{backend}: rank {rank} of 2, attempt {attempt}, sum 2" for rank in range(2) for attempt in range(2)
    ]


@pytest.mark.exhaustive
def test_job_runs_again_under_the_same_name(daemon, nothing_is_kept):
    for _ in range(2):
        with job(daemon, "asyncdist", "well", "--nproc-per-node=1", "--rdzv-id=job") as agent:
            assert agent.output_of_workers() == ["asyncdist: rank 0 of 1, attempt 0, sum 1"]
        nothing_is_kept()


@pytest.mark.exhaustive
def test_late_node_joins_an_elastic_job(daemon, nothing_is_kept):
    elastic = [*ELASTIC, "--rdzv-conf=last_call_timeout=1"]
    with job(daemon, "asyncdist", "needs two", *elastic) as first:
        first.wait_for_output("rank 0 of 1")
        with job(daemon, "asyncdist", "needs two", *elastic) as second:
            said = first.output_of_workers() + second.output_of_workers()
    assert sorted(line.partition(", ")[0] for line in said) == [
        "asyncdist: rank 0 of 1", "asyncdist: rank 0 of 2", "asyncdist: rank 1 of 2"
    ]  # fmt: skip
    nothing_is_kept()


@pytest.mark.exhaustive
def test_elastic_job_continues_without_a_lost_node(daemon, nothing_is_kept):
    brief = "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    elastic = [*ELASTIC, brief, "--max-restarts=3"]
    with (
        job(daemon, "asyncdist", "loses one", *elastic) as first,
        job(daemon, "asyncdist", "loses one", *elastic) as lost,
    ):
        for agent in (first, lost):
            agent.wait_for_output("of 2, attempt 0")
        lost.kill_with_workers()
        said = first.output_of_workers()
    assert re.search(r"rank 0 of 1, attempt [1-3], sum 1", "\n".join(said)), said
    nothing_is_kept()


@pytest.mark.exhaustive
def test_survivor_goes_on_while_another_agent_restarts_its_worker(daemon, tmp_path):
    """Each process has an agent of its own, so that no agent ends the survivor; the processes meet in a job."""
    stop = tmp_path / "stop"
    program = [HERE / "program_joining.py", f"asyncdist://127.0.0.1:{daemon.port}/job", stop]
    alone = ["--standalone", "--nproc-per-node=1", "--max-restarts=1", "--monitor-interval=0.2", *program]
    with agent(*alone) as first, agent(*alone) as second:
        seen, there = first.wait_for_output(" of 2"), second.wait_for_output(" of 2")
        survivor, victim = (each.lines[n - 1].split()[1] for each, n in ((first, seen), (second, there)))
        os.kill(int(victim), signal.SIGKILL)
        seen = first.wait_for_output(f"process {survivor} is one of 1", seen)
        first.wait_for_output(f"process {survivor} is one of 2", seen)
        second.wait_for_output(" of 2", there)
        stop.touch()
        for each in (first, second):
            each.reader.join(LIMIT)
            assert each.process.wait(LIMIT) == 0, "\n".join(each.lines)
    assert not any(f"process {victim}" in line for line in second.lines[there:]), second.lines
    assert all(line.split()[1] == survivor for line in first.lines if line.startswith("process")), first.lines


def test_url_initializes_one_world_after_another(daemon, nursery, ended, nothing_is_kept):
    """Two jobs share the daemon. Their keys are deleted when their last rank has left."""
    backends = ("asyncdist", "gloo", "asyncdist")
    ranks = [
        nursery.start(AT_DAEMON, "meet", f"asyncdist://127.0.0.1:{daemon.port}/{job}", rank, 2, backends)
        for job in ("one", "other")
        for rank in range(2)
    ]
    for rank in ranks:
        assert [rank.hear() for _ in backends] == [(backend, 2.0) for backend in backends]
    ended(*ranks)
    nothing_is_kept()


@pytest.mark.exhaustive
def test_torch_rpc_runs_together_with_asyncdist_groups(daemon, nursery, ended):
    """The trainers use DistributedDataParallel and reach a parameter server through torch's RPC."""
    url = f"asyncdist://127.0.0.1:{daemon.port}"
    ranks = [nursery.start(HERE / "program_rpc.py", "train", url, rank) for rank in range(3)]
    for rank in range(2):
        weight, bias, rows = ranks[rank].hear(LIMIT)
        # The first step averages the sums 20 and 25 of the embeddings, the second 17.5 and 22.5.
        first, second = 22.5, 22.5 - 2.5
        assert weight == [1 - 0.5 * (first + second)] * 4
        assert bias == -1.0
        # Each trainer has embeddings of its own; the gradient of its words is the layer's weight.
        step = 0.5 * 1 + 0.5 * (1 - 0.5 * first)
        assert rows == [row - step * (row % 2 == rank) for row in range(10)]
    ended(*ranks)


def test_url_without_a_port_is_refused(nursery, ended):
    rank = nursery.start(AT_DAEMON, "meet", "asyncdist://somewhere/job", 0, 1, ("asyncdist",))
    assert "lacks its port; use asyncdist://host:port" in rank.hear()
    ended(rank)


def test_import_of_torch_elastic_does_not_import_asyncdist(without_asyncdist):
    loaded = without_asyncdist.start(HERE / "program_replaced.py", "loaded").hear()
    assert "asyncdist.torchrun" in loaded
    assert "asyncdist.torch_backend" not in loaded


@pytest.mark.parametrize("allowed", [(), pytest.param(("--c10d", "any"), marks=pytest.mark.exhaustive)])
def test_agent_warns_where_c10d_workers_cannot_connect(allowed, monkeypatch, caplog):
    outside = outward(Config())
    if is_loopback(outside):
        pytest.skip("this machine has no address but loopback")
    monkeypatch.setenv("ASYNCDIST_TOKEN", "secret")
    with started("--host", outside, "--port", "0", *allowed, ASYNCDIST_TOKEN="secret") as daemon:
        agent = handler()(RendezvousParameters("asyncdist", f"{outside}:{daemon.port}", "job", 1, 1))
        try:
            for _ in range(2):
                agent.next_rendezvous()
        finally:
            agent.shutdown()
    said = [record.getMessage() for record in caplog.records if record.name == "asyncdist"]
    assert len(said) == (0 if allowed else 1)
    assert all("Start the daemon with --c10d loopback" in one for one in said)
