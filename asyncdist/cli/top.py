"""``asyncdist top``: show where each rank of a running job is, and who waits for whom."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from asyncdist.cli.console import print_stacks, screen
from asyncdist.cli.option_types import Seconds

if TYPE_CHECKING:
    from rich.console import Console

    from asyncdist.kernel.tracing.job_status import JobStatus
    from asyncdist.status.viewer import JobViewer

_NEW_GENERATION = 30.0
"""Seconds for which the command waits for a job that it has shown and that answers no more."""


def _rank_or_all(text: str) -> int | None:
    if text != "all" and not text.isdecimal():
        raise click.BadParameter(f"{text!r} is not the number of a rank, and not 'all'")
    return None if text == "all" else int(text)


@click.command(short_help="Show where each rank of a running job is, live.")
@click.argument("job", envvar="ASYNCDIST_JOB")
@click.option(
    "--interval",
    default=1.0,
    type=Seconds(0.1),
    show_default=True,
    metavar="SECONDS",
    help="Time between two refreshes.",
)
@click.option("--once", is_flag=True, help="Show the job once. The default where the output is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per refresh, one per line.")
@click.option(
    "--stacks",
    multiple=True,
    type=_rank_or_all,
    metavar="RANK",
    help="Print the Python stacks of this rank, or of all.",
)
@click.option(
    "--ranks", type=click.IntRange(0), metavar="N", help="Show at most N ranks, stuck ones first; 0 shows all."
)
@click.option("--world", default="", metavar="ID", help="Show the world whose id begins so, of a job with several.")
@click.option(
    "--late",
    default=10.0,
    type=Seconds(),
    show_default=True,
    metavar="SECONDS",
    help="Mark a rank for which others wait for so long.",
)
@click.option("--timeout", default=10.0, type=Seconds(0.1), show_default=True, help="Seconds to find the job.")
@click.pass_context
def top(ctx: click.Context, /, job: str, **options: Any) -> None:
    """Show where each rank of JOB is: its call, who waits for whom, rates, and which rank holds up the others.

    JOB is the init method of the job, or only host:port: tcp://host:port of rank 0's store, asyncdist://host:port/job at a
    store daemon, a file:///path, or the MASTER_ADDR:MASTER_PORT of torchrun. The token and the certificates are those of
    the job (ASYNCDIST_TOKEN, ASYNCDIST_TLS_*). One rank that this machine reaches answers for all.

    The exit status of --once and --json is 0 if all ranks answer and none holds up others, 1 if not, and 2 if no rank of
    the job could be asked.

    \b
    asyncdist top asyncdist://10.0.0.1:29500/digits
    asyncdist top 10.0.0.1:29500 --stacks 3       # where the Python code of rank 3 is
    asyncdist top 10.0.0.1:29500 --once --json | jq '.ranks[] | select(.culprit)'
    """
    try:
        code = asyncio.run(_run(job, **options))
    except KeyboardInterrupt:
        # Without --once, Ctrl-C is how the user ends the command.
        if options["as_json"] or options["once"]:
            raise
        code = 0
    ctx.exit(code)


async def _run(
    job: str,
    *,
    interval: float,
    once: bool,
    as_json: bool,
    stacks: Sequence[int | None],
    ranks: int | None,
    world: str,
    late: float,
    timeout: float,
) -> int:
    from asyncdist.config import Config
    from asyncdist.status.viewer import JobViewer

    console = screen()
    async with JobViewer(job, Config.from_environment(), timeout=timeout, world=world) as viewer:
        if stacks:
            return await _show_stacks(viewer, stacks, console, as_json=as_json)
        if as_json:
            return await _print_json(viewer, job, interval, late, once=once)
        if once or not console.is_terminal:
            status = await _status(viewer, interval, late)
            _print_status(status, viewer, job, console, ranks)
            return 0 if status.healthy else 1
        return await _show_live(viewer, job, interval, late, ranks, console)


async def _status(viewer: JobViewer, window: float, late: float) -> JobStatus:
    from asyncdist.kernel.tracing.job_status import job_status

    return job_status(await viewer.ask(window=window), late)


# -- once --------------------------------------------------------------------------------------------


def _print_status(status: JobStatus, viewer: JobViewer, job: str, console: Console, ranks: int | None) -> None:
    from asyncdist.cli.top_view import picture

    console.print(picture(status, job, console, limit=ranks or None))
    if viewer.others:
        console.print(
            f"other worlds of the job (--world): {', '.join(other[:8] for other in viewer.others)}", style="dim"
        )


async def _print_json(viewer: JobViewer, job: str, interval: float, late: float, *, once: bool) -> int:
    while True:
        begun = time.monotonic()
        status = await _status(viewer, interval, late)
        click.echo(json.dumps({"job": job, **status.as_dict(), "other_worlds": viewer.others}))
        if once:
            return 0 if status.healthy else 1
        sys.stdout.flush()
        await asyncio.sleep(max(0.0, begun + interval - time.monotonic()))


async def _show_stacks(viewer: JobViewer, wanted: Sequence[int | None], console: Console, *, as_json: bool) -> int:
    from asyncdist.errors import UsageError
    from asyncdist.kernel.tracing.job_status import job_status

    first = job_status(await viewer.ask(calls=0))
    known = [row.rank for row in first.rows]
    chosen = known if None in wanted else sorted({rank for rank in wanted if rank is not None})
    if unknown := [rank for rank in chosen if rank not in known]:
        raise UsageError(f"the job has no rank {unknown[0]}: its ranks go from 0 to {known[-1]}")
    status = job_status(await viewer.ask(calls=1, stacks=chosen))
    rows = [row for row in status.rows if row.rank in chosen]
    if as_json:
        found = [
            {
                "rank": row.rank,
                "reason": row.reason,
                "stacks": [
                    {"kind": stack.kind, "name": stack.name, "frames": [frame._asdict() for frame in stack.frames]}
                    for stack in row.stacks
                ],
            }
            for row in rows
        ]
        click.echo(json.dumps({"world": status.world, "ranks": found}))
    else:
        for row in rows:
            where = f" ({row.host}, process {row.pid})" if row.host else ""
            console.print(f"rank {row.rank}{where}", style="bold", markup=False)
            print_stacks(row.stacks, console)
            if not row.stacks:
                console.print(
                    f"  no stacks: {row.reason}. On its host, py-spy dump --pid PID shows the stacks of a process that is "
                    "stopped or holds its interpreter",
                    style="red",
                    markup=False,
                    soft_wrap=True,
                )
    return 0 if all(row.stacks for row in rows) else 1


# -- live --------------------------------------------------------------------------------------------


async def _show_live(
    viewer: JobViewer, job: str, interval: float, late: float, ranks: int | None, console: Console
) -> int:
    from rich.live import Live
    from rich.text import Text

    from asyncdist.cli.top_view import picture, rows_that_fit
    from asyncdist.errors import AsyncdistError

    status = await _status(viewer, interval, late)
    gone_since: float | None = None
    with Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        while True:
            limit = None if ranks == 0 else ranks or rows_that_fit(console)
            live.update(picture(status, job, console, limit=limit), refresh=True)
            begun = time.monotonic()
            await asyncio.sleep(interval)
            try:
                status = await _status(viewer, time.monotonic() - begun, late)
                gone_since = None
            except AsyncdistError as error:
                gone_since = gone_since or begun
                if time.monotonic() - gone_since > _NEW_GENERATION:
                    break
                live.update(Text(f"{job}: waiting for the job. {error}", style="yellow"), refresh=True)
    console.print(picture(status, job, console))
    console.print(f"the job has not answered for {_NEW_GENERATION:g} s: it has ended, or is not reached any more")
    return 0
