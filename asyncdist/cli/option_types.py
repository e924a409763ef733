"""Option types of the command line: lists, seconds, rates, socket files, and output files and folders."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import click

from asyncdist.errors import UsageError

T = TypeVar("T")


class ListOf(click.ParamType, Generic[T]):  # type: ignore[type-arg]
    """Values separated by commas, without duplicates.

    Args:
        what: A name for the values, with an example, for the error message.
        read_one: Converts a text to a value; returns None or raises ValueError if the text is not valid.
        allow_empty: Whether the list may be empty.
    """

    name = "text"

    def __init__(self, what: str, read_one: Callable[[str], T | None], *, allow_empty: bool = False) -> None:
        self.what, self.read_one, self.allow_empty = what, read_one, allow_empty

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[T, ...]:
        if isinstance(value, tuple):
            return value
        words = dict.fromkeys(word.strip() for word in value.split(",") if word.strip())
        values: tuple[T, ...] = ()
        with contextlib.suppress(ValueError):
            values = tuple(one for word in words if (one := self.read_one(word)) is not None)
        if len(values) < len(words) or not (values or self.allow_empty):
            self.fail(f"{value!r} is not a list of {self.what}", param, ctx)
        return values


def names_among(known: Sequence[str]) -> ListOf[str]:
    """Return the type of names from ``known``, separated by commas."""

    def read_one(name: str) -> str:
        if name not in known:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(known)}")
        return name

    return ListOf("names", read_one, allow_empty=True)


class Seconds(click.FloatRange):
    """A number of seconds, at least ``at_least`` (0 by default)."""

    def __init__(self, at_least: float = 0.0) -> None:
        super().__init__(at_least)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        # A comparison with NaN is false, so the range check accepts it.
        if math.isnan(seconds):
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return seconds


def rate(text: str) -> str:
    """Check the rate of a link in the words of ``tc``."""
    from asyncdist.cli.bench.limits import rate_in_bytes

    try:
        rate_in_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return text


class SocketFile(click.Path):
    """A socket file. Its path is made absolute, because a store takes an absolute path for a socket file, not a host."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return Path(os.fsdecode(super().convert(value, param, ctx))).absolute()


class NewFile(click.Path):
    """An output file in an existing folder. Checks before the work starts that the file can be written."""

    def __init__(self, *, allow_dash: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path, allow_dash=allow_dash)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"there is no folder {str(path.parent)!r}: create it first", param, ctx)
        if not path.exists() and not os.access(path.parent, os.W_OK):
            self.fail(f"the folder {str(path.parent)!r} is not writable", param, ctx)
        return path


class NewFolder(click.Path):
    """An output folder, created if it does not exist. Make the option eager if other options may name files in it."""

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
    """Turn an OSError inside the block into a UsageError that names the file or folder."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror or error}): name another path") from error
