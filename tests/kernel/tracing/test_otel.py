"""OpenTelemetry spans of operations. Skipped without opentelemetry-sdk."""

import asyncio
import sys
import time

import pytest
import torch

from asyncdist.errors import GroupError, UsageError
from asyncdist.kernel.tracing.otel import trace_operations
from asyncdist.testing.cluster import world_of


@pytest.fixture
def provider():
    """A tracer provider, and the exporter that keeps its spans."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(SimpleSpanProcessor(exporter))
    yield made, exporter
    made.shutdown()


async def test_span_of_an_operation_is_a_child_of_the_span_at_its_call(provider, each):
    tracer_provider, exporter = provider
    tracer = tracer_provider.get_tracer("a test")
    before = time.time_ns()
    async with world_of(2) as groups:
        with trace_operations(tracer_provider):
            with tracer.start_as_current_span("step") as step:
                pending = groups[0].all_reduce(torch.ones(6))
            await asyncio.gather(pending, groups[1].all_reduce(torch.ones(6)))
            await asyncio.gather(groups[0].send(torch.ones(2), 1, tag=3), groups[1].recv(torch.ones(2), 0, tag=3))
        await each(groups, lambda group: group.barrier())
    spans = {(span.name, span.attributes.get("asyncdist.rank")): span for span in exporter.get_finished_spans()}
    assert set(spans) == {("step", None), ("all_reduce", 0), ("all_reduce", 1), ("send", 0), ("recv", 1)}
    reduced = spans["all_reduce", 0]
    assert reduced.parent.span_id == step.get_span_context().span_id
    assert spans["all_reduce", 1].parent is None
    assert before - 1e9 <= reduced.start_time <= reduced.end_time <= time.time_ns() + 1e9
    assert dict(reduced.attributes) | {"asyncdist.longest_wait_seconds": 0} == {
        "asyncdist.group": "world",
        "asyncdist.rank": 0,
        "asyncdist.size": 2,
        "asyncdist.sequence": 1,
        "asyncdist.bytes": 24,
        "asyncdist.dtype": "float32",
        "asyncdist.longest_wait_rank": 1,
        "asyncdist.longest_wait_seconds": 0,
    }
    assert spans["send", 0].attributes["asyncdist.peer"] == 1


async def test_span_of_a_failed_operation_has_its_error(provider):
    tracer_provider, exporter = provider
    async with world_of(2) as groups:
        with trace_operations(tracer_provider):
            pending = groups[0].all_reduce(torch.ones(6))
            groups[1].abort("enough")
            with pytest.raises(GroupError):
                await pending
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code.name == "ERROR"
    assert "enough" in span.status.description
    assert span.attributes["error.type"] == "GroupAbortedError"


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(UsageError, match=r"opentelemetry-api: pip install opentelemetry-api"):
        trace_operations()
