"""``asyncdist bench``: measure asyncdist, gloo, Open MPI and plain sockets in one run. Registered in `cli`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from asyncdist.bench.plan import (
    COLLECTIVES,
    CONTENDERS,
    ON_DEVICES,
    RIVALS,
    STEPS,
    THROUGH_TORCH,
    WAYS,
    BenchPlan,
    steps_left_out,
)
from asyncdist.cli import list_options
from asyncdist.cli.option_types import NewFile, NewFolder, reporting_write_errors
from asyncdist.errors import UnsupportedError

if TYPE_CHECKING:
    from asyncdist.bench.result import Report, ResultRow

_SIZES = "4,1K,64K,256K,1M,4M,25M,100M"
_SIZES_ON_DEVICES = "4K,64K,1M,25M,100M,1G"
_AVAILABLE = "available"


def _rivals(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Read names of rivals; "available" means every installed one, and reports those that are not installed."""
    asked = list_options.names_among((*RIVALS, _AVAILABLE))(ctx, param, value)
    if _AVAILABLE not in asked:
        return asked
    from asyncdist.bench.launch import mpi_missing

    missing = mpi_missing()
    if missing is not None:
        click.echo(f"mpi is left out: {missing}", err=True)
    return tuple(rival for rival in RIVALS if rival != "mpi" or missing is None)


def _given_sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    return None if value is None else list_options.sizes(ctx, param, value)


def _transports(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Read names of transports. The name of each further transport is its key in the results."""
    asked = list_options.words(value)
    taken = [name for name in asked[1:] if name in CONTENDERS]
    if not asked or taken:
        raise click.BadParameter(f"{taken[0]!r} is not a transport" if taken else "name at least one transport")
    return asked


@click.command(short_help="Measure collectives against gloo, Open MPI and plain sockets in the same run.")
@click.argument(
    "collectives",
    nargs=-1,
    type=click.Choice(tuple(dict.fromkeys((*COLLECTIVES, *ON_DEVICES)))),
    metavar="[COLLECTIVE]...",
)
@click.option(
    "--ranks",
    default=2,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Number of rank processes to start: at least 2 on the CPU.",
)
@click.option("--sizes", callback=_given_sizes, help=f"Tensor sizes in bytes.  [default: {_SIZES}]")
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    type=click.Choice(("cpu", "cuda")),
    help=f"`cuda`: measure {', '.join(ON_DEVICES)} of CUDA tensors over every usable device back end, and over gloo and "
    "NCCL of torch.",
)
@click.option(
    "--against",
    default="",
    callback=_rivals,
    help="Rivals to measure in the same run: gloo, mpi, raw, or `available` for all that are installed.",
)
@click.option("--registered", is_flag=True, help="Also measure tensors made by asyncdist.empty(shared=True).")
@click.option(
    "--awaited", is_flag=True, help="Also measure `await` on uvloop, and its extra cost over a blocking call."
)
@click.option("--ddp", is_flag=True, help="Also measure a training step of a model with 6.3 M parameters.")
@click.option(
    "--through",
    default="",
    callback=list_options.names_among(WAYS),
    help="`torch`: also measure stock PyTorch on asyncdist's back end and on gloo: single calls and training steps (DDP, "
    "FSDP2, tensor parallel).",
)
@click.option(
    "--transport",
    "transports",
    default="auto",
    show_default=True,
    callback=_transports,
    help="Transport of asyncdist. Each further one is measured as another contender.",
)
@click.option("--repeat", type=click.IntRange(1), help="Timed calls of each contender.  [default: by size, 1000 to 12]")
@click.option("--pin", is_flag=True, help="Pin each rank to one core: less noise, but less realistic.")
@click.option(
    "--json", "json_file", type=NewFile(allow_dash=True), help="Write all results to this file as JSON; - is stdout."
)
@click.option("--plot", "plot_file", type=NewFile(), help="Plot time against size into this file (png, svg or pdf).")
@click.option(
    "--output", type=NewFolder(), is_eager=True, help="Write bench.md, bench.json and bench.png into this folder."
)
def bench(
    collectives: tuple[str, ...],
    ranks: int,
    sizes: tuple[int, ...] | None,
    device: str,
    against: tuple[str, ...],
    registered: bool,
    awaited: bool,
    ddp: bool,
    through: tuple[str, ...],
    transports: tuple[str, ...],
    repeat: int | None,
    pin: bool,
    json_file: Path | None,
    plot_file: Path | None,
    output: Path | None,
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
    asyncdist bench broadcast all_gather --ranks 4 --sizes 64K,1M --json figures.json
    asyncdist bench --device cuda          # with --ranks 1: asyncdist's NCCL and torch's
    asyncdist bench store --help           # the store against torch's TCPStore
    """
    from asyncdist.bench.processes import run
    from asyncdist.cli.console import configured

    configured()
    if device == "cuda":
        _on_devices(collectives, ranks, sizes, repeat, json_file, output)
        return
    unknown = [name for name in collectives if name not in COLLECTIVES]
    if unknown:
        raise click.BadParameter(f"{unknown[0]} is measured only with --device cuda")
    if ranks < 2:
        raise click.BadParameter("a collective needs at least 2 ranks on the CPU", param_hint="--ranks")
    _check_before_measuring(plot_file, output)
    plan = BenchPlan(
        collectives=tuple(dict.fromkeys(collectives)) or (THROUGH_TORCH if through else ("all_reduce",)),
        sizes=sizes or list_options.read_sizes(_SIZES),
        ranks=ranks,
        against=tuple(dict.fromkeys((*against, *(("gloo",) if through else ())))),
        awaited=awaited,
        registered=registered,
        through=through,
        steps=_steps(ranks) if through else STEPS[: 1 if ddp else 0],
        transports=transports,
        repeat=repeat,
        pin=pin,
    )
    with _ProgressBar() as progress:
        report = run(plan, progress.update)
    _print(report, to_stderr=str(json_file) == "-")
    _write(report, json_file, plot_file, output)


def _on_devices(
    collectives: tuple[str, ...],
    ranks: int,
    sizes: tuple[int, ...] | None,
    repeat: int | None,
    json_file: Path | None,
    output: Path | None,
) -> None:
    """Measure CUDA tensors; raise UnsupportedError if there is no device."""
    others = [name for name in collectives if name not in ON_DEVICES]
    if others:
        raise click.BadParameter(f"--device cuda measures only {', '.join(ON_DEVICES)}, not {others[0]}")
    from asyncdist.bench.processes import run
    from asyncdist.transport.device_streams import cuda_missing

    missing = cuda_missing()
    if missing is not None:
        raise UnsupportedError(f"nothing was measured, as there is no CUDA device: {missing}")
    possible = tuple(name for name in ON_DEVICES if name != "send" or ranks > 1)
    wanted = tuple(dict.fromkeys(collectives)) or possible
    plan = BenchPlan(wanted, sizes or list_options.read_sizes(_SIZES_ON_DEVICES), ranks, repeat=repeat, device="cuda")
    with _ProgressBar() as progress:
        report = run(plan, progress.update)
    _tell_of_devices(report, json_file, output)


def _tell_of_devices(report: Report, json_file: Path | None, output: Path | None) -> None:
    from asyncdist.bench.report import device_table
    from asyncdist.bench.report.table import about_run
    from asyncdist.cli.console import screen

    console = screen(stderr=str(json_file) == "-")
    words = f"{report.device_rows[0].device}; {about_run(report)}"
    for line in (words, *device_table.notes(report)):
        console.print(line, style="dim", soft_wrap=True, markup=False)
    for table in device_table.device_tables(report):
        console.print(table)
    figures = _write_figures(report, json_file)
    if output is not None:
        with reporting_write_errors(output):
            (output / "device.md").write_text(device_table.device_markdown(report, words), encoding="utf-8")
            (output / "device.json").write_text(figures, encoding="utf-8")


def _write_figures(report: Report, json_file: Path | None) -> str:
    """Return all results as JSON text, and write it to ``json_file`` if that is given."""
    figures = json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n"
    if json_file is not None:
        with reporting_write_errors(json_file), click.open_file(str(json_file), "w", encoding="utf-8") as file:
            file.write(figures)
    return figures


def _steps(ranks: int) -> tuple[str, ...]:
    """Return the training steps that ``ranks`` ranks can take here; report the others on stderr."""
    reasons = steps_left_out(ranks)
    for step, reason in reasons.items():
        click.echo(f"{step.replace('_', ' ')} is left out: {reason}", err=True)
    return tuple(step for step in STEPS if step not in reasons)


def _check_before_measuring(plot_file: Path | None, output: Path | None) -> None:
    """Raise before the measurements, not minutes later, if the plot cannot be drawn."""
    if plot_file is not None or output is not None:
        from asyncdist.bench.report.plot import require_matplotlib

        require_matplotlib(plot_file)


class _ProgressBar:
    """A progress bar on stderr while ranks measure; disabled where stderr is not a terminal."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from asyncdist.cli.console import screen

        console = screen(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
        # No automatic refresh: a drawing thread would take a core from the ranks.
        self._bar = Progress(
            *columns,
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting the ranks", total=1.0)

    def __enter__(self) -> _ProgressBar:
        self._bar.start()
        self._bar.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: float, row: ResultRow | None) -> None:
        """Draw the share that is done (0 to 1), and the newest result if there is one."""
        from asyncdist.bench.report.table import duration, size

        said = "measuring"
        if row is not None:
            said = f"{row.collective} {size(row.nbytes)}: {duration(row.ours.median)}"
        self._bar.update(self._task, completed=done, description=said)
        self._bar.refresh()


def _print(report: Report, *, to_stderr: bool) -> None:
    from asyncdist.bench.report.table import about_run, tables
    from asyncdist.cli.console import screen

    console = screen(stderr=to_stderr)
    console.print(about_run(report), style="dim", soft_wrap=True, markup=False)
    for table in tables(report):
        console.print(table)


def _write(report: Report, json_file: Path | None, plot_file: Path | None, output: Path | None) -> None:
    figures = _write_figures(report, json_file)
    if plot_file is not None:
        _plot(report, plot_file)
    if output is not None:
        from asyncdist.bench.report.markdown_page import markdown

        with reporting_write_errors(output):
            (output / "bench.md").write_text(markdown(report), encoding="utf-8")
            (output / "bench.json").write_text(figures, encoding="utf-8")
        _plot(report, output / "bench.png")


def _plot(report: Report, path: Path) -> None:
    from asyncdist.bench.report.plot import draw_benchmark

    with reporting_write_errors(path):
        draw_benchmark(report, path)
