import pytest

from asyncdist.environment import Launch
from asyncdist.errors import UsageError
from asyncdist.rendezvous.init_method import InitMethod, url_of

TORCHRUN = Launch(rank=1, world_size=4, master_addr="node0", master_port=29500, agent_store=True, run_id="job")


def read(url=None, rank=None, world_size=None, has_store=False, launch=None):
    return InitMethod.read(url, rank=rank, world_size=world_size, has_store=has_store, launch=launch or Launch())


def test_launcher_variables_suffice():
    assert read(launch=TORCHRUN) == InitMethod("agent", 1, 4, "node0", 29500)
    assert read("env://", launch=TORCHRUN) == read(launch=TORCHRUN)


def test_master_address_is_rank_0_without_an_agent():
    launch = Launch(rank=0, world_size=2, master_addr="node0", master_port=29500)
    assert read(launch=launch) == InitMethod("direct", 0, 2, "node0", 29500)


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [("tcp://10.0.0.1:23456", "10.0.0.1", 23456), ("tcp://[::1]:23456", "::1", 23456), ("tcp://node0:0", "node0", 0)],
)
def test_tcp(url, host, port):
    assert read(url, 0, 2) == InitMethod("direct", 0, 2, host, port)
    assert url_of(host, port) == url


@pytest.mark.parametrize(
    ("url", "path"),
    [("file:///tmp/meet", "/tmp/meet"), ("file:///tmp/a%20b", "/tmp/a b"), ("file://relative/meet", "relative/meet")],
)
def test_file(url, path):
    assert read(url, 1, 2) == InitMethod("file", 1, 2, path=path)


def test_a_store_needs_no_url():
    assert read(None, 1, 2, has_store=True) == InitMethod("store", 1, 2)


def test_arguments_override_the_query_which_overrides_the_launcher():
    url = "tcp://node0:1?rank=2&world_size=8"
    assert (read(url, launch=TORCHRUN).rank, read(url, launch=TORCHRUN).world_size) == (2, 8)
    assert (read(url, 3, 9, launch=TORCHRUN).rank, read(url, 3, 9).world_size) == (3, 9)


def test_minus_one_means_unset():
    assert read("tcp://node0:1", -1, -1, launch=TORCHRUN) == InitMethod("direct", 1, 4, "node0", 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "world_size is not known: WORLD_SIZE is not set .*torchrun"),
        ({"world_size": 2}, "rank is not known: RANK is not set .*torchrun"),
        ({"rank": 0, "world_size": 2}, "MASTER_ADDR and MASTER_PORT not set"),
        ({"rank": 0, "world_size": 2, "launch": Launch(master_addr="node0")}, "^MASTER_PORT not set"),
        ({"rank": 2, "world_size": 2}, "rank 2 is outside a world of 2: ranks go from 0 to 1"),
        ({"rank": -2, "world_size": 2}, "rank -2 is outside"),
        ({"rank": 0, "world_size": 0}, "at least one rank"),
        ({"url": "tcp://node0", "rank": 0, "world_size": 1}, "lacks its port"),
        ({"url": "tcp://:29500", "rank": 0, "world_size": 1}, "lacks its host"),
        ({"url": "tcp://node0:99999", "rank": 0, "world_size": 1}, "not a number from 0 to 65535"),
        ({"url": "tcp://[::1:3", "rank": 0, "world_size": 1}, "cannot be read"),
        ({"url": "tcp://node0:1?rank=one", "world_size": 1}, "rank='one' .* not a whole number"),
        (
            {"url": "tcp://node0:0", "rank": 1, "world_size": 2},
            "port in init_method 'tcp://node0:0' is 0, .* every rank",
        ),
        (
            {"launch": Launch(0, 2, master_addr="node0", master_port=0)},
            "^MASTER_PORT is 0, so .* every rank the same port",
        ),
        (
            {"launch": Launch(1, 2, master_addr="node0", master_port=0)},
            "^MASTER_PORT is 0, so .* every rank the same port",
        ),
        ({"url": "file://", "rank": 0, "world_size": 1}, "lacks its path"),
        ({"url": "zeus://node0:1", "rank": 0, "world_size": 1}, "has an unknown scheme; use env://, tcp://"),
        ({"url": "env://", "rank": 0, "world_size": 1, "has_store": True}, "exclude each other"),
        (
            {"launch": Launch(rank=0, world_size=1, master_addr="node0", master_port=70000)},
            "MASTER_PORT is 70000; ports go from 0 to 65535",
        ),
    ],
)
def test_invalid_arguments_are_named_in_the_error(arguments, says):
    with pytest.raises(UsageError, match=says):
        read(**arguments)


# The variables that srun sets for MPICH's proxy, and the proxy passes to all its ranks.
_PROXY = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environ", "rank", "world_size", "on_one_host"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, 1, 2, True),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 3, 4, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, 0, 2, False),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}, 1, 3, False),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", **_PROXY}, 1, 2, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}, None, None, False),  # a batch script, not a process of a step
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "RANK": "5", "WORLD_SIZE": "8"}, 5, 8, False),  # torchrun in an MPI job
    ],
)  # fmt: skip
def test_variables_of_every_launcher(environ, rank, world_size, on_one_host):
    launch = Launch.from_environment(environ)
    assert (launch.rank, launch.world_size, launch.on_one_host) == (rank, world_size, on_one_host)


@pytest.mark.parametrize(
    ("environ", "local_rank"),
    [
        ({"PMI_RANK": "5", "PMI_SIZE": "6", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3", **_PROXY}, 2),
        ({"PMI_RANK": "5", "PMI_SIZE": "6", **_PROXY, "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}, 1),  # srun --mpi=pmi2
    ],
)
def test_local_rank_from_the_launcher(environ, local_rank):
    assert Launch.from_environment(environ).local_rank == local_rank
