"""``asyncdist bench``: measure asyncdist, gloo, Open MPI and plain sockets in one run. Registered in `cli`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncdist.cli.bench.plan import COLLECTIVES, CONTENDERS, RIVALS, THROUGH, THROUGH_TORCH, BenchPlan
from asyncdist.cli.option_types import ListOf, NewFile, NewFolder, names_among, rate, reporting_write_errors
from asyncdist.config import whole_number

if TYPE_CHECKING:
    from asyncdist.cli.bench.launch import Note
    from asyncdist.cli.bench.result import ResultRow

_SIZES = "4,1K,64K,256K,1M,4M,25M,100M"
_SIZES_BETWEEN_HOSTS = "4,1K,64K,1M,25M"
_AVAILABLE = "available"
_IN_THE_REPOSITORY = {name: name for name in ("ddp", "devices", "faults", "rpc", "store", "weights")} | {
    "send": "devices"
}
_SIZE_LIST = ListOf("sizes such as 4,64K,25M", whole_number)


def _elsewhere(benchmark: str) -> str:
    return f"in a checkout of the sources, `python -m benchmarks {benchmark}` measures that"


class _Collective(click.Choice[str]):
    """The name of a collective. Names of other benchmarks are refused with their command."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in _IN_THE_REPOSITORY:
            self.fail(_elsewhere(_IN_THE_REPOSITORY[value]), param, ctx)
        return super().convert(value, param, ctx)


def _moved(ctx: click.Context, param: click.Parameter, value: str | bool | None) -> None:
    """Refuse an option of another benchmark with its command."""
    if value not in (None, False, "cpu"):
        raise click.BadParameter(_elsewhere("devices" if param.name == "device" else "ddp steps sharded"))


def _rivals(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Replace "available" by every installed rival; report on stderr which are not installed."""
    if _AVAILABLE not in value:
        return value
    from asyncdist.cli.bench.contenders.mpi import mpi_missing

    missing = mpi_missing()
    if missing is not None:
        click.echo(f"mpi is left out: {missing}", err=True)
    return tuple(rival for rival in RIVALS if rival != "mpi" or missing is None)


def _transports(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse further transports with the name of a contender, because the name of each is a key of the results."""
    for name in value[1:]:
        if name in CONTENDERS:
            raise click.BadParameter(f"{name!r} is not a transport")
    return value


@click.command(short_help="Measure collectives against gloo, Open MPI and plain sockets in the same run.")
@click.argument("collectives", nargs=-1, type=_Collective(COLLECTIVES), metavar="[COLLECTIVE]...")
@click.option("--ranks", type=click.IntRange(2, 64), help="Number of rank processes to start.  [default: 2]")
@click.option(
    "--hosts",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Measure between N hosts, which are network namespaces of this machine; needs root. The largest size is also "
    "measured with 2, 4, … hosts.",
    metavar="N",
)
@click.option(
    "--ranks-per-host",
    default=2,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Number of ranks on each of several --hosts.",
)
@click.option(
    "--link",
    default="1gbit",
    show_default=True,
    type=rate,
    help="Rate of the link of each of several --hosts, in the words of tc.",
)
@click.option("--sizes", type=_SIZE_LIST, help=f"Tensor sizes in bytes.  [default: {_SIZES}]")
@click.option("--device", hidden=True, expose_value=False, callback=_moved)
@click.option("--ddp", is_flag=True, hidden=True, expose_value=False, callback=_moved)
@click.option(
    "--against",
    default="",
    type=names_among((*RIVALS, _AVAILABLE)),
    callback=_rivals,
    help="Rivals to measure in the same run: gloo, mpi, raw (plain sockets), or `available` for all that are installed.",
)
@click.option(
    "--than",
    default="",
    metavar="FILE",
    help="Also show the figures that an earlier run has written with --json. Those of another machine are refused.",
)
@click.option("--registered", is_flag=True, help="Also measure tensors made by asyncdist.empty(shared=True).")
@click.option(
    "--awaited", is_flag=True, help="Also measure `await` on uvloop, and how much longer it takes than blocking."
)
@click.option(
    "--through",
    default="",
    type=names_among(THROUGH),
    help="`torch`: also measure the functions of torch.distributed, on asyncdist's back end and on gloo.",
)
@click.option(
    "--transport",
    "transports",
    default="auto",
    show_default=True,
    type=ListOf("transports such as auto,tcp", str),
    callback=_transports,
    help="Transport of asyncdist. In a list, separated by commas, each further one is another contender.",
)
@click.option(
    "--repeat", type=click.IntRange(1), help="Number of timed calls of each contender.  [default: 1000 to 12, by size]"
)
@click.option(
    "--busy",
    default=0,
    show_default=True,
    metavar="N",
    type=click.IntRange(0, 1024),
    help="Start N processes that compute on the same cores, as data loaders or another job do.",
)
@click.option(
    "--calibrate",
    "profile",
    type=NewFile(),
    help="Measure the links between the hosts of a job instead, and write a profile for ASYNCDIST_PROFILE to this file on "
    "rank 0. Start the command with a launcher on every host.",
)
@click.option(
    "--json", "json_file", type=NewFile(allow_dash=True), help="Write all results to this file as JSON; - is stdout."
)
@click.option("--plot", "plot_file", type=NewFile(), help="Plot time against size into this file (png, svg or pdf).")
@click.option(
    "--output",
    type=NewFolder(),
    is_eager=True,
    help="Write bench.md, bench.json and bench.png into this folder; between hosts hosts.md and so on.",
)
def bench(
    collectives: tuple[str, ...],
    ranks: int | None,
    sizes: tuple[int, ...] | None,
    json_file: Path | None,
    plot_file: Path | None,
    output: Path | None,
    profile: Path | None,
    **options: Any,
) -> None:
    """Measure collectives between rank processes on this machine.

    The command starts the processes. Contenders take turns in one run, so that noise affects all of them alike, and
    every result is checked before it is timed.

    COLLECTIVE is one of all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, gather, scatter and
    barrier. The default is all_reduce, or with --through torch the six collectives that training uses.

    \b
    asyncdist bench --against gloo,mpi,raw --transport auto,tcp --registered
    asyncdist bench --through torch
    asyncdist bench --against gloo --busy 2    # with two processes that compute
    asyncdist bench all_reduce all_gather --hosts 8 --ranks-per-host 2 --link 1gbit --against gloo,raw
    asyncdist bench broadcast all_gather --ranks 4 --sizes 64K,1M --json figures.json
    torchrun --nnodes 2 --no-python ... asyncdist bench --calibrate links.json
    """
    from asyncdist.cli.bench import launch, tables
    from asyncdist.cli.bench.result import read_earlier
    from asyncdist.cli.console import print_page, screen, write_json, write_page
    from asyncdist.config import Config

    Config.from_environment()
    if profile is not None:
        import asyncio

        from asyncdist.cli.bench.calibration import calibrate

        asyncio.run(calibrate(profile))
        return
    plan = _plan(collectives, ranks, sizes, **options)
    earlier = read_earlier(Path(plan.than)) if plan.than else {}
    if plot_file is not None or output is not None:
        from asyncdist.kernel.tracing.plotting import require_matplotlib

        require_matplotlib(plot_file)
    cases = sum(len(each.cases) for each in (*launch.between_fewer_hosts(plan), plan))
    with _progress_bar(cases) as note:
        report = launch.sweep(plan, note)
    report.add_earlier(earlier)
    page, stem = tables.bench_page(report), tables.file_stem(plan)
    print_page(screen(stderr=str(json_file) == "-"), page)
    if json_file is not None:
        write_json(report.as_json(), json_file)
    if output is not None:
        write_page(page, report.as_json(), output, stem)
    for path in (plot_file, output and output / f"{stem}.png"):
        if path is not None:
            from asyncdist.cli.bench.plot import benchmark_figure

            with reporting_write_errors(path):
                benchmark_figure(report).savefig(path, dpi=150)


def _plan(
    collectives: tuple[str, ...],
    ranks: int | None,
    sizes: tuple[int, ...] | None,
    *,
    hosts: int,
    ranks_per_host: int,
    link: str,
    against: tuple[str, ...],
    through: tuple[str, ...],
    **options: Any,
) -> BenchPlan:
    if hosts > 1:
        if ranks is not None:
            raise click.BadParameter("between hosts, give --ranks-per-host instead", param_hint="--ranks")
        if "mpi" in against:
            click.echo("mpi is left out: it is measured only on one host", err=True)
        against = tuple(rival for rival in against if rival != "mpi")
        ranks = hosts * ranks_per_host
    return BenchPlan(
        collectives=tuple(dict.fromkeys(collectives)) or (THROUGH_TORCH if through else ("all_reduce",)),
        sizes=sizes or _SIZE_LIST.convert(_SIZES if hosts == 1 else _SIZES_BETWEEN_HOSTS, None, None),
        ranks=ranks or 2,
        hosts=hosts,
        link=link if hosts > 1 else "",
        against=tuple(dict.fromkeys((*against, *(("gloo",) if through else ())))),
        through=through,
        **options,
    )


@contextlib.contextmanager
def _progress_bar(cases: int) -> Iterator[Note]:
    """Show a progress bar if stderr is a terminal. Yield the function that draws a new row."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from asyncdist.cli.console import screen
    from asyncdist.cli.page import duration, size

    console = screen(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeElapsedColumn(),
    )  # fmt: skip
    # No automatic refresh: a drawing thread would take a core from the ranks.
    bar = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal)
    task = bar.add_task("starting the ranks", total=cases)

    def note(row: ResultRow) -> None:
        bar.update(task, advance=1, description=f"{row.name} {size(row.nbytes)}: {duration(row.blocking.median)}")
        bar.refresh()

    with bar:
        bar.refresh()
        yield note
