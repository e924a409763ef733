"""The command line ``asyncdist``. Only the commands that need torch import it, so that the others start fast."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any

import click

from asyncdist import __version__
from asyncdist.cli.bench import command as _bench
from asyncdist.cli.explain import explain
from asyncdist.cli.info import info
from asyncdist.cli.store import store
from asyncdist.cli.top import top
from asyncdist.cli.trace import trace
from asyncdist.errors import AsyncdistError, BenchmarkError

SETTINGS_OF_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


@contextlib.contextmanager
def _reporting_failed_writes() -> Iterator[None]:
    """Report a failed write to the standard output without a traceback."""
    try:
        yield
    except OSError as error:
        # An error of a file has its name, and click ends the program without a message if the pipe is closed.
        if error.filename is not None or error.errno not in _WRITE_ERRORS:
            raise
        # From Python 3.13 on, what is left in the buffer decides the exit code, because it fails again at the end.
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        raise click.ClickException(f"cannot write to the standard output: {error.strerror}") from error


class ReportingGroup(click.Group):
    """Prints one line and exits: after an `AsyncdistError` with status 2, a failed benchmark with 1, on Ctrl-C with 130."""

    def invoke(self, ctx: click.Context) -> Any:
        with _reporting_failed_writes():
            try:
                return super().invoke(ctx)
            except AsyncdistError as error:
                failure = click.ClickException(str(error))
                failure.exit_code = 1 if isinstance(error, BenchmarkError) else 2  # type: ignore[misc]
                raise failure from error
            except KeyboardInterrupt:
                click.echo("interrupted", err=True)
                ctx.exit(130)  # the exit status that shells give a command that SIGINT ends

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Make the context, which prints the help."""
        with _reporting_failed_writes():
            return super().make_context(*args, **kwargs)


@click.group(cls=ReportingGroup, context_settings=SETTINGS_OF_HELP)
@click.version_option(__version__, prog_name="asyncdist")
def main() -> None:
    """The commands of asyncdist, a communication runtime for distributed PyTorch.

    Settings are environment variables with names ASYNCDIST_*; `asyncdist info --settings` lists them.
    """


for _command in (store, info, explain, _bench.bench, trace, top):
    main.add_command(_command)
