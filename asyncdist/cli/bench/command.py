"""``asyncdist bench``: measure asyncdist, gloo, Open MPI and plain sockets in one run. Registered in `cli`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncdist.cli.bench.plan import (
    COLLECTIVES,
    CONTENDERS,
    HEADS,
    ON_DEVICES,
    RIVALS,
    STEPS,
    THROUGH,
    THROUGH_TORCH,
    BenchPlan,
)
from asyncdist.cli.option_types import ListOf, NamesAmong, NewFile, NewFolder, reporting_write_errors
from asyncdist.config import DEFAULT_LANES, whole_number
from asyncdist.errors import UnsupportedError

if TYPE_CHECKING:
    from asyncdist.cli.bench.result import ResultRow

_SIZES = "4,1K,64K,256K,1M,4M,25M,100M"
_SIZES_BETWEEN_HOSTS = "4,1K,64K,1M,25M"
_SIZES_ON_DEVICES = "4K,64K,1M,25M,100M,1G"
_AVAILABLE = "available"
_IN_THE_REPOSITORY = ("ddp", "faults", "rpc", "store", "weights")
_SIZE_LIST = ListOf("sizes such as 4,64K,25M", whole_number)


class _Collective(click.Choice[str]):
    """The name of a collective. Names of other benchmarks are refused with their command."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in _IN_THE_REPOSITORY:
            self.fail(f"in a checkout of the sources, `python -m benchmarks {value}` measures that", param, ctx)
        return super().convert(value, param, ctx)


def _rivals(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Replace "available" by every installed rival; report on stderr which are not installed."""
    if _AVAILABLE not in value:
        return value
    from asyncdist.cli.bench.contenders.mpi import mpi_missing

    missing = mpi_missing()
    if missing is not None:
        click.echo(f"mpi is left out: {missing}", err=True)
    return tuple(rival for rival in RIVALS if rival != "mpi" or missing is None)


def _link(ctx: click.Context, param: click.Parameter, value: str) -> str:
    from asyncdist.cli.bench.hosts.limits import rate_in_bytes

    try:
        rate_in_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


def _transports(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse further transports with the name of a contender, because the name of each is a key of the results."""
    for name in value[1:]:
        if name in CONTENDERS:
            raise click.BadParameter(f"{name!r} is not a transport")
    return value


@click.command(short_help="Measure collectives against gloo, Open MPI and plain sockets in the same run.")
@click.argument(
    "collectives",
    nargs=-1,
    type=_Collective(tuple(dict.fromkeys((*COLLECTIVES, *ON_DEVICES)))),
    metavar="[COLLECTIVE]...",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 64),
    help="Number of rank processes to start; at least 2 on the CPU.  [default: 2]",
)
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
    callback=_link,
    help="Rate of the link of each of several --hosts, in the words of tc.",
)
@click.option("--sizes", type=_SIZE_LIST, help=f"Tensor sizes in bytes.  [default: {_SIZES}]")
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    type=click.Choice(("cpu", "cuda")),
    help=f"`cuda`: measure {', '.join(ON_DEVICES)} on CUDA tensors over every usable device back end, and over torch's "
    "gloo and NCCL.",
)
@click.option(
    "--against",
    default="",
    type=NamesAmong((*RIVALS, _AVAILABLE)),
    callback=_rivals,
    help="Rivals to measure in the same run: gloo, mpi, raw (plain sockets), or `available` for all that are installed.",
)
@click.option("--registered", is_flag=True, help="Also measure tensors made by asyncdist.empty(shared=True).")
@click.option(
    "--awaited", is_flag=True, help="Also measure `await` on uvloop, and how much longer it takes than blocking."
)
@click.option("--ddp", is_flag=True, help="Also measure a DDP training step of a model with 6.3 M parameters.")
@click.option(
    "--through",
    default="",
    type=NamesAmong(THROUGH),
    help="`torch`: also measure stock PyTorch on asyncdist's back end and on gloo: single calls and training steps (DDP, "
    "FSDP2, tensor parallel).",
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
    help="Write bench.md, bench.json and bench.png into this folder; between hosts hosts.md and so on, on devices "
    "device-2.md and so on, with the number of ranks.",
)
def bench(
    collectives: tuple[str, ...],
    ranks: int | None,
    sizes: tuple[int, ...] | None,
    device: str,
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
    barrier. The default is all_reduce, or with --through torch the six collectives that training uses. With
    --device cuda it is one of all_reduce, broadcast and send, by default all of them.

    \b
    asyncdist bench --against gloo,mpi,raw --transport auto,tcp --registered
    asyncdist bench --through torch
    asyncdist bench --against gloo --busy 2    # with two processes that compute
    asyncdist bench all_reduce all_gather --hosts 8 --ranks-per-host 2 --link 1gbit --against gloo,raw
    asyncdist bench broadcast all_gather --ranks 4 --sizes 64K,1M --json figures.json
    asyncdist bench --device cuda          # with --ranks 1: asyncdist's NCCL and torch's
    torchrun --nnodes 2 --no-python ... asyncdist bench --calibrate links.json
    """
    from asyncdist.cli.bench import launch
    from asyncdist.cli.bench.hosts.sweep import sweep
    from asyncdist.cli.console import print_page, screen, write_json, write_page
    from asyncdist.config import Config

    Config.from_environment()
    if profile is not None:
        _calibrate(profile)
        return
    if device == "cuda":
        if options["hosts"] > 1:
            raise click.BadParameter("CUDA tensors are measured on one host", param_hint="--hosts")
        plan = _device_plan(collectives, ranks or 2, sizes, options["repeat"])
    else:
        plan = _cpu_plan(collectives, ranks, sizes, **options)
    if plot_file is not None or output is not None:
        from asyncdist.kernel.tracing.plotting import require_matplotlib

        require_matplotlib(plot_file)
    with _progress_bar() as progress:
        report = sweep(plan, progress) if plan.hosts > 1 else launch.run(plan, progress)
    if device == "cuda":
        from asyncdist.cli.bench.report.device_table import device_page

        page, stem = device_page(report), f"device-{plan.ranks}"
    else:
        from asyncdist.cli.bench.report.tables import bench_page

        page, stem = bench_page(report), "hosts" if plan.hosts > 1 else "bench"
    print_page(screen(stderr=str(json_file) == "-"), page)
    if json_file is not None:
        write_json(report.as_json(), json_file)
    if output is not None:
        write_page(page, report.as_json(), output, stem)
    for path in (plot_file, output and output / f"{stem}.png"):
        if path is not None:
            from asyncdist.cli.bench.report.plot import benchmark_figure

            with reporting_write_errors(path):
                benchmark_figure(report).savefig(path, dpi=150)


def _calibrate(profile: Path) -> None:
    """Measure the links between hosts, and show the values on rank 0."""
    import asyncio

    from asyncdist.cli.bench.calibration import ROUNDS, calibrate
    from asyncdist.cli.console import screen

    found = asyncio.run(calibrate(profile))
    if found.rank != 0:
        return
    values, console = found.values, screen()
    console.print(f"Links between {found.hosts} hosts, medians of {ROUNDS} measurements:")
    console.print(f"  a round of messages takes {values['alpha'] * 1e6:.1f} µs")
    console.print(f"  each message takes {values['overhead'] * 1e6:.1f} µs more")
    console.print(f"  each byte takes {values['beta'] * 1e9:.2f} ns more: {8e-9 / values['beta']:.2f} Gbit/s")
    console.print(f"  {_lanes_text(values)}")
    console.print(f"{profile} has them. To use them, set ASYNCDIST_PROFILE={profile} for rank 0.", markup=False)


def _lanes_text(values: Mapping[str, float]) -> str:
    """Say which connections move a large tensor, and how their times compare."""
    from asyncdist.groups.calibration.profile import FEW_LANES, LANES, MANY_LANES, MANY_LANES_WITH_THREADS, lanes_of

    if FEW_LANES not in values:
        return f"a large tensor takes {DEFAULT_LANES} connections: the links are too slow to compare them with {LANES}"
    times = [
        f"{values[name] / values[FEW_LANES]:.2f} times as long over {LANES}{text}"
        for name, text in ((MANY_LANES, ""), (MANY_LANES_WITH_THREADS, " with threads"))
        if name in values
    ]
    chosen = lanes_of(values)
    text = f"{chosen.get('lanes', DEFAULT_LANES)} connections{' with threads' if 'tcp_threads' in chosen else ''}"
    return f"a large tensor takes {text}: it takes {' and '.join(times)} as over {DEFAULT_LANES}"


def _cpu_plan(
    collectives: tuple[str, ...],
    ranks: int | None,
    sizes: tuple[int, ...] | None,
    *,
    hosts: int,
    ranks_per_host: int,
    link: str,
    against: tuple[str, ...],
    through: tuple[str, ...],
    ddp: bool,
    **options: Any,
) -> BenchPlan:
    if hosts > 1:
        if ranks is not None:
            raise click.BadParameter("between hosts, give --ranks-per-host instead", param_hint="--ranks")
        if "mpi" in against:
            click.echo("mpi is left out: it is measured only on one host", err=True)
        against = tuple(rival for rival in against if rival != "mpi")
        ranks = hosts * ranks_per_host
    ranks = 2 if ranks is None else ranks
    for name in collectives:
        if name not in COLLECTIVES:
            raise click.BadParameter(f"{name} is measured only with --device cuda")
    if ranks < 2:
        raise click.BadParameter("a collective needs at least 2 ranks on the CPU", param_hint="--ranks")
    return BenchPlan(
        collectives=tuple(dict.fromkeys(collectives)) or (THROUGH_TORCH if through else ("all_reduce",)),
        sizes=sizes or _SIZE_LIST.read(_SIZES if hosts == 1 else _SIZES_BETWEEN_HOSTS),
        ranks=ranks,
        hosts=hosts,
        link=link if hosts > 1 else "",
        against=tuple(dict.fromkeys((*against, *(("gloo",) if through else ())))),
        through=through,
        steps=_steps(ranks) if through else STEPS[: 1 if ddp else 0],
        **options,
    )


def _device_plan(
    collectives: tuple[str, ...], ranks: int, sizes: tuple[int, ...] | None, repeat: int | None
) -> BenchPlan:
    """Return the plan for CUDA tensors; raise UnsupportedError if there is no device."""
    from asyncdist.kernel.transport.device_streams import cuda_missing

    for name in collectives:
        if name not in ON_DEVICES:
            raise click.BadParameter(f"--device cuda measures only {', '.join(ON_DEVICES)}, not {name}")
    missing = cuda_missing()
    if missing is not None:
        raise UnsupportedError(f"nothing was measured, as there is no CUDA device: {missing}")
    default = tuple(name for name in ON_DEVICES if name != "send" or ranks > 1)
    measured = tuple(dict.fromkeys(collectives)) or default
    return BenchPlan(measured, sizes or _SIZE_LIST.read(_SIZES_ON_DEVICES), ranks, repeat=repeat, device="cuda")


def _steps(ranks: int) -> tuple[str, ...]:
    """Return the training steps that are possible with ``ranks`` ranks; report the others on stderr."""
    if HEADS % ranks == 0:
        return STEPS
    click.echo(f"tensor parallel is left out: {ranks} ranks cannot share {HEADS} heads", err=True)
    return tuple(step for step in STEPS if step != "tensor_parallel")


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[float, ResultRow | None], None]]:
    """Show a progress bar if stderr is a terminal. Yield the function that draws the completed share and a new row."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from asyncdist.cli.console import screen
    from asyncdist.cli.page import duration, size

    console = screen(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
    )
    # No automatic refresh: a drawing thread would take a core from the ranks.
    bar = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal)
    task = bar.add_task("starting the ranks", total=1.0)

    def update(done: float, row: ResultRow | None) -> None:
        text = "measuring"
        if row is not None and "asyncdist" in row.timings:
            text = f"{row.name} {size(row.nbytes)}: {duration(row.blocking.median)}"
        bar.update(task, completed=done, description=text)
        bar.refresh()

    with bar:
        bar.refresh()
        yield update
