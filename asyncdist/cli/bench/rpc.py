"""``asyncdist bench rpc``: compare remote calls with torch's RPC and Ray. Registered in `cli`."""

from __future__ import annotations

from pathlib import Path

import click

from asyncdist.cli.option_types import NewFolder


@click.command("bench rpc")
@click.option(
    "--rounds", default=7, show_default=True, type=click.IntRange(1), help="Rounds in which all contenders take turns."
)
@click.option(
    "--calls", default=1000, show_default=True, type=click.IntRange(1), help="Calls one after another in a turn."
)
@click.option(
    "--in-flight", default=1000, show_default=True, type=click.IntRange(1), help="Number of concurrent calls."
)
@click.option("--output", type=NewFolder(), help="Write rpc.json and rpc.md into this folder.")
def bench_rpc(rounds: int, calls: int, in_flight: int, output: Path | None) -> None:
    """Compare remote calls with torch's RPC over TensorPipe, and with Ray's async actors where Ray is installed.

    The cases are a round trip with a number, calls per second with many in flight, a tensor of 16 MiB as an argument, and a
    call to 1,000 objects in 8 processes. asyncdist calls over a Unix socket with shared memory, and over TCP. A run takes
    two minutes and needs an idle machine.

    \b
    asyncdist bench rpc --output docs/bench
    asyncdist bench rpc --rounds 3
    """
    from asyncdist.bench.report.rpc_table import rpc_page
    from asyncdist.bench.rpc.benchmark import RpcPlan, run_rpc_benchmark
    from asyncdist.cli.console import print_page, screen, write_page

    err = screen(stderr=True)
    plan = RpcPlan(rounds=rounds, calls=calls, burst=20 * in_flight, in_flight=in_flight)
    with err.status("starting") as status:
        report = run_rpc_benchmark(plan, lambda doing: status.update(doing))
    page = rpc_page(report)
    print_page(screen(), page)
    if output is not None:
        write_page(page, report.as_json(), output, "rpc")
