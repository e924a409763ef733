"""What options take beside words and numbers: seconds, socket files, and files that are to be written."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from asyncdist.errors import UsageError


class Seconds(click.FloatRange):
    """A number of seconds from 0 up."""

    def __init__(self, at_least: float = 0.0) -> None:
        super().__init__(at_least)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):  # which is not below any limit either
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds


class SocketFile(click.Path):
    """A path from the root on: by that a socket file is told from a host's name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return Path(os.fsdecode(super().convert(value, param, ctx))).absolute()


class NewFile(click.Path):
    """A file that is to be written, in a folder that is there: one that is not is told of before the work is done."""

    def __init__(self, *, allow_dash: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path, allow_dash=allow_dash)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"there is no folder {str(path.parent)!r}", param, ctx)
        if not path.exists() and not os.access(path.parent, os.W_OK):
            self.fail(f"nothing may be written into {str(path.parent)!r}", param, ctx)
        return path


class NewFolder(click.Path):
    """A folder to write into, made now if it is not there. Its option is to be eager: files may be meant to lie in it."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.fail(f"{path} cannot be written ({error.strerror})", param, ctx)
        return path


@contextlib.contextmanager
def reporting_write_errors(path: Path) -> Iterator[None]:
    """Raise UsageError, which names the file or folder, where the file system does not let it be written."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror or error}): name another") from error
