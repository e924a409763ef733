"""``ASYNCDIST_METRICS_PORT``: every rank of a host serves its own metrics."""

import contextlib
import socket
import urllib.request

import pytest

from tests.support.ports import free_port

pytestmark = pytest.mark.processes


def two_free_ports():
    """Return the first of two consecutive free ports."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        return response.read().decode()


@pytest.mark.parametrize("local_ranks", [("1", "0"), ("", "")], ids=["launched", "by hand"])
def test_each_rank_serves_its_metrics_at_the_port_plus_its_local_rank(job, all_do, face, local_ranks):
    """A rank that was started by hand has no local rank, and adds its rank. Later worlds use the same port."""
    base = two_free_ports()
    ranks = []
    for local_rank in local_ranks:
        ranks += job.start(1, face, ASYNCDIST_METRICS_PORT=str(base), LOCAL_RANK=local_rank)
    for calls in (3, 6):
        job.meet(ranks)
        all_do(ranks, "all_reduce", None, 10, 3)
        assert all_do(ranks, "destroy") == [None, None]
        for rank, local_rank in enumerate(local_ranks):
            scraped = scrape(base + int(local_rank or rank))
            labels = f'group="world",operation="all_reduce",rank="{rank}"'
            assert f"asyncdist_operation_seconds_count{{{labels}}} {calls:.1f}\n" in scraped
            assert f"asyncdist_operation_bytes_total{{{labels}}} {calls * 40:.1f}\n" in scraped


def test_port_in_use_is_an_error_that_says_so(job, face, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (told,) = job.start(1, face, ASYNCDIST_METRICS_PORT=str(port))
        told.tell("init", f"file://{tmp_path}/alone", 0, 1)
        answer = told.hear()
    assert answer.kind == "AddressError"
    assert f"cannot serve metrics at 127.0.0.1:{port} (Address already in use)" in answer.text
