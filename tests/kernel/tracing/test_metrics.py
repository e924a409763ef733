"""Prometheus metrics of groups: what is counted, the limits of labels, the HTTP port, and the dashboard."""

import asyncio
import json
import logging
import re
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from asyncdist.config import Config
from asyncdist.errors import AddressError, GroupError, UsageError
from asyncdist.kernel.tracing.metrics import GroupMetrics, serve_configured_metrics, serve_metrics
from asyncdist.testing.cluster import world_of

DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "grafana" / "asyncdist-groups.json"


@pytest.fixture
def metrics():
    made = GroupMetrics(straggler_seconds=0.0, max_groups=2, max_peers=1)
    yield made
    made.close()


def value_of(metrics: GroupMetrics, name: str, **labels: object) -> float | None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return registry.get_sample_value(name, {key: str(value) for key, value in labels.items()})


async def test_operations_are_counted_by_group_rank_and_operation(metrics, transport, each):
    async with world_of(2, transport=transport) as groups:
        for _ in range(3):
            await each(groups, lambda group: group.all_reduce(torch.ones(6)))
        await each(groups, lambda group: group.barrier())
    for rank in range(2):
        reduced = {"group": "world", "rank": rank, "operation": "all_reduce"}
        assert value_of(metrics, "asyncdist_operation_seconds_count", **reduced) == 3
        assert value_of(metrics, "asyncdist_operation_seconds_bucket", **reduced, le="+Inf") == 3
        assert value_of(metrics, "asyncdist_operation_seconds_sum", **reduced) > 0
        assert value_of(metrics, "asyncdist_operation_bytes_total", **reduced) == 72
        assert value_of(metrics, "asyncdist_operation_errors_total", **reduced) == 0
        assert value_of(metrics, "asyncdist_operation_seconds_count", **{**reduced, "operation": "barrier"}) == 1


async def test_errors_are_counted_without_their_bytes(metrics):
    async with world_of(2) as groups:
        pending = groups[0].all_reduce(torch.ones(3))
        groups[1].abort("enough")
        with pytest.raises(GroupError):
            await pending
    labels = {"group": "world", "rank": 0, "operation": "all_reduce"}
    assert value_of(metrics, "asyncdist_operation_errors_total", **labels) == 1
    assert value_of(metrics, "asyncdist_operation_bytes_total", **labels) == 0


async def test_late_rank_is_the_straggler_of_the_rank_that_waits(metrics, transport):
    async with world_of(2, transport=transport) as groups:
        pending = groups[0].all_reduce(torch.ones(8))
        for _ in range(5):
            await asyncio.sleep(0)
        labels = {"group": "world", "rank": 0, "operation": "all_reduce"}
        assert value_of(metrics, "asyncdist_operations_pending", **labels) == 1
        assert value_of(metrics, "asyncdist_oldest_pending_seconds", **labels) > 0
        await asyncio.gather(pending, groups[1].all_reduce(torch.ones(8)))
        assert value_of(metrics, "asyncdist_operations_pending", **labels) == 0
        assert value_of(metrics, "asyncdist_oldest_pending_seconds", **labels) == 0
    assert value_of(metrics, "asyncdist_straggler_operations_total", group="world", rank=0, peer=1) == 1
    assert value_of(metrics, "asyncdist_wait_seconds_total", group="world", rank=0, peer=1) > 0


async def test_groups_and_peers_above_the_limits_are_counted_as_other(metrics, each):
    async with world_of(3) as groups:
        await groups[0].world.new_group([0], "x" * 500).barrier()
        await groups[0].world.new_group([0], "second").barrier()
        for name in ("third", "fourth"):
            await groups[0].world.new_group([0], name).barrier()
        for source in (1, 2):
            await asyncio.gather(groups[source].send(torch.ones(1), 0), groups[0].recv(torch.ones(1), source))
    labels = {"rank": 0, "operation": "barrier"}
    assert value_of(metrics, "asyncdist_operation_seconds_count", group="x" * 79 + "…", **labels) == 1
    assert value_of(metrics, "asyncdist_operation_seconds_count", group="second (rank 0)", **labels) == 1
    assert value_of(metrics, "asyncdist_operation_seconds_count", group="other", **labels) == 2
    assert value_of(metrics, "asyncdist_wait_seconds_total", group="other", rank=0, peer=1) > 0
    assert value_of(metrics, "asyncdist_wait_seconds_total", group="other", rank=0, peer="other") > 0


async def test_closed_metrics_count_no_more(metrics):
    async with world_of(1) as (group,):
        await group.barrier()
        metrics.close()
        await group.barrier()
    assert value_of(metrics, "asyncdist_operation_seconds_count", group="world", rank=0, operation="barrier") == 1


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return answer.read().decode()


async def test_port_answers_scrapes_until_it_is_closed(each):
    with serve_metrics() as server:
        async with world_of(2) as groups:
            await each(groups, lambda group: group.all_reduce(torch.ones(4)))
        text = await asyncio.to_thread(scrape, server.port)
        with pytest.raises(AddressError, match=f"cannot serve metrics at 127.0.0.1:{server.port}"):
            serve_metrics(server.port)
    assert 'asyncdist_operation_bytes_total{group="world",operation="all_reduce",rank="0"} 16.0' in text
    with pytest.raises(OSError):
        await asyncio.to_thread(scrape, server.port)


def test_configured_port_0_is_any_free_port_which_the_log_names(monkeypatch, caplog):
    monkeypatch.setattr("asyncdist.kernel.tracing.metrics._configured", None)
    caplog.set_level(logging.INFO, "asyncdist")
    assert serve_configured_metrics(Config(), 0) is None
    config = Config.from_environment({"ASYNCDIST_METRICS_PORT": "0", "ASYNCDIST_METRICS_HOST": "localhost"})
    with serve_configured_metrics(config, 3) as server:
        # A process has one server, however many worlds it opens.
        assert serve_configured_metrics(config, 4) is server
        assert f"serving metrics at http://localhost:{server.port}/metrics" in caplog.messages


@pytest.mark.parametrize("port", [65535, 99999])
def test_impossible_port_is_refused(monkeypatch, port):
    monkeypatch.setattr("asyncdist.kernel.tracing.metrics._configured", None)
    with pytest.raises(AddressError, match=f"cannot serve metrics at 127.0.0.1:{port + 1} "):
        serve_configured_metrics(Config(metrics_port=port), 1)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"prometheus-client: pip install prometheus-client"):
        serve_metrics()


async def test_dashboard_shows_the_metrics_that_exist(metrics, each):
    async with world_of(2) as groups:
        await each(groups, lambda group: group.all_reduce(torch.ones(4)))
    served = {sample.name for family in metrics.collect() for sample in family.samples}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    expressions += [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    named = {name for expression in expressions for name in re.findall(r"asyncdist_\w+", expression)}
    assert len(named) >= 6
    assert named <= served
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
