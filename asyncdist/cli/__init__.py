"""The command line ``asyncdist``. Only the commands that need torch import it, so that the others start fast."""

from __future__ import annotations

from typing import Any

import click

from asyncdist import __version__
from asyncdist.cli.bench import bench
from asyncdist.cli.bench_faults import bench_faults
from asyncdist.cli.bench_store import bench_store
from asyncdist.cli.benchmarks.bench_rpc import bench_rpc
from asyncdist.cli.info import info
from asyncdist.cli.store import store
from asyncdist.cli.top import top
from asyncdist.cli.trace import trace
from asyncdist.errors import AsyncdistError, BenchmarkError


class _Failure(click.ClickException):
    def __init__(self, error: AsyncdistError) -> None:
        super().__init__(str(error))
        self.exit_code = 1 if isinstance(error, BenchmarkError) else 2  # type: ignore[misc]


class _Main(click.Group):
    """Prints the message of an `AsyncdistError` and exits with status 2, or 1 after a failed benchmark."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve `bench store`, `bench faults` and `bench rpc`; `bench` with any other argument measures collectives."""
        for command in (bench_store, bench_faults, bench_rpc):
            if args[:2] == (command.name or "").split():
                return command.name, command, args[2:]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AsyncdistError as error:
            raise _Failure(error) from error


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="asyncdist")
def main() -> None:
    """The commands of asyncdist, a communication runtime for distributed PyTorch.

    Settings are environment variables with names ASYNCDIST_*; `asyncdist info` lists them.
    """


for _command in (store, info, bench, trace, top):
    main.add_command(_command)
