"""The command line ``asyncdist``. Only the commands that need torch import it, so that the others start fast."""

from __future__ import annotations

from typing import Any

import click

from asyncdist import __version__
from asyncdist.cli.bench import bench
from asyncdist.cli.info import info
from asyncdist.cli.store import store
from asyncdist.cli.top import top
from asyncdist.cli.trace import trace
from asyncdist.errors import AsyncdistError, BenchmarkError

SETTINGS_OF_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _Failure(click.ClickException):
    def __init__(self, error: AsyncdistError) -> None:
        super().__init__(str(error))
        self.exit_code = 1 if isinstance(error, BenchmarkError) else 2  # type: ignore[misc]


class ReportingGroup(click.Group):
    """Prints the message of an `AsyncdistError` and exits with status 2, or 1 after a failed benchmark."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AsyncdistError as error:
            raise _Failure(error) from error


@click.group(cls=ReportingGroup, context_settings=SETTINGS_OF_HELP)
@click.version_option(__version__, prog_name="asyncdist")
def main() -> None:
    """The commands of asyncdist, a communication runtime for distributed PyTorch.

    Settings are environment variables with names ASYNCDIST_*; `asyncdist info` lists them.
    """


for _command in (store, info, bench, trace, top):
    main.add_command(_command)
