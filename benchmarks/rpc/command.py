"""``python -m benchmarks rpc``: compare remote calls with torch's RPC and Ray."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.publication import output_option, publish
from benchmarks.rpc import benchmark
from benchmarks.rpc.table import rpc_page


@click.command()
@click.option(
    "--rounds", default=7, show_default=True, type=click.IntRange(1), help="Rounds in which all contenders take turns."
)
@click.option(
    "--calls", default=1000, show_default=True, type=click.IntRange(1), help="Calls one after another in a turn."
)
@click.option(
    "--in-flight", default=1000, show_default=True, type=click.IntRange(1), help="Number of concurrent calls."
)
@output_option("rpc")
def rpc(rounds: int, calls: int, in_flight: int, output: Path | None) -> None:
    """Compare remote calls with torch's RPC over TensorPipe, and with Ray's async actors where Ray is installed.

    The cases are a round trip with a number, calls per second with many in flight, a tensor of 16 MiB as an argument, and a
    call to 1,000 objects in 8 processes. asyncdist calls over a Unix socket with shared memory, and over TCP. A run takes
    two minutes and needs an idle machine.

    \b
    python -m benchmarks rpc --output docs/bench
    python -m benchmarks rpc --rounds 3
    """
    plan = benchmark.RpcPlan(rounds=rounds, calls=calls, burst=20 * in_flight, in_flight=in_flight)
    publish(benchmark.run_rpc_benchmark, plan, rpc_page, "rpc", output)
