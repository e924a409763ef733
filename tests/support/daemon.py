"""``asyncdist store`` in a process of its own, for tests of programs that stand on one, and of the command itself.

    with started("--port", "0") as daemon, daemon.client() as store:
        store.set("key", "value")
        assert daemon.ask("get", "key") == "value\\n"
        assert daemon.stop() == (0, "")

It knows nothing of the settings in this process's environment, only of those that it is given; and it fails if anything
has made it import torch or numpy.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from asyncdist.config import Config
from asyncdist.store import TCPStore

LIMIT = 30.0
"""Seconds for what no daemon takes one for."""

_PROGRAM = """
import sys
from asyncdist.cli import main
try:
    main(prog_name="asyncdist")
finally:
    assert not {"torch", "numpy"} & set(sys.modules)
"""


def command(*arguments: str) -> list[str]:
    """Return the command line of ``asyncdist store`` with these arguments."""
    return [sys.executable, "-c", _PROGRAM, "store", *arguments]


def environment(**settings: str) -> dict[str, str]:
    """Return this process's environment with these settings of asyncdist, and no others."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCDIST_")}
    return {**clean, **settings}


def ended(*arguments: str, stdin: str | None = None, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run ``asyncdist store`` with these arguments to its end."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(**settings),
        check=False,
        input=stdin,
    )


def asked(*arguments: str, code: int = 0, stdin: str | None = None) -> str:
    """Run a command that ends with ``code``; return what it printed, or complained of where that is not 0."""
    done = ended(*arguments, stdin=stdin)
    assert done.returncode == code, done
    return done.stderr if code else done.stdout


class Daemon:
    """A daemon that has said that it is ready, in the line ``ready``; ``host`` and ``port`` are from there."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self.ready = process.stdout.readline()
        assert self.ready.startswith("asyncdist store is ready at "), process.stderr.read()
        tcp = re.search(r"tcp://\[?(.+?)\]?:(\d+) ", self.ready)  # not there where it listens at a socket file alone
        self.host, self.port = (tcp[1], int(tcp[2])) if tcp else ("", 0)

    def client(self, token: str | None = None) -> TCPStore:
        """Return a client, which does not try again when its connection breaks."""
        return TCPStore(self.host, self.port, timeout=LIMIT, config=Config(token=token, store_reconnect=0.0))

    def ask(self, *arguments: str, code: int = 0, stdin: str | None = None) -> str:
        """Ask it with a command line; returns what `asked` does."""
        return asked("--port", str(self.port), *arguments, code=code, stdin=stdin)

    def end(self) -> tuple[int, str]:
        """Wait for its end; return its exit code and what it complained of."""
        printed, complained = self.process.communicate(timeout=LIMIT)
        assert printed == "", printed
        return self.process.returncode, complained

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Tell it to stop, and return what `end` does."""
        self.process.send_signal(number)
        return self.end()


@contextmanager
def started(
    *arguments: str, before: Callable[[], object] | None = None, program: Collection[str] = (), fds: Collection[int] = (),
    **settings: str,
) -> Iterator[Daemon]:  # fmt: skip
    """Start a daemon, which is killed in the end if it is still there.

    ``before`` is called in its process first, ``fds`` are left open there; ``program`` is run instead of `command`.
    """
    process = subprocess.Popen(
        [*program] or command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(**settings), preexec_fn=before, pass_fds=fds,
    )  # fmt: skip
    try:
        yield Daemon(process)
    finally:
        process.kill()
        process.communicate()
