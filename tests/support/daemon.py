"""``asyncdist store`` as a process, for tests of the command and of programs that use a store.

    with started("--port", "0") as daemon, daemon.client() as store:
        store.set("key", "value")
        assert daemon.ask("get", "key") == "value\\n"
        assert daemon.stop() == (0, "")

The process inherits none of asyncdist's settings. It fails if it imports torch or numpy.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from click.testing import CliRunner

from asyncdist.cli import main
from asyncdist.config import Config
from asyncdist.store import TCPStore

LIMIT = 30.0
"""Seconds for what takes less than one second on an idle machine."""

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
    """Return this process's environment with only these settings of asyncdist."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCDIST_")}
    return {**clean, **settings}


def ended(*arguments: str, stdin: str | None = None, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run ``asyncdist store`` with these arguments until it ends."""
    options = {"capture_output": True, "text": True, "timeout": LIMIT, "check": False}
    return subprocess.run(command(*arguments), env=environment(**settings), input=stdin, **options)


def refused(*arguments: str, **settings: str) -> str:
    """Run ``asyncdist store`` where it cannot serve; return the only error that it prints."""
    done = ended(*arguments, **settings)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr
    return done.stderr


def asked(*arguments: str, code: int = 0, stdin: str | None = None) -> str:
    """Run a command that queries a store, in this process; return its output, or its errors if ``code`` is not 0."""
    unset = {name: None for name in os.environ if name.startswith("ASYNCDIST_")}
    run = CliRunner(env=unset).invoke(main, ["store", *arguments], input=stdin)
    assert run.exit_code == code, run.output
    return run.stderr if code else run.stdout


class Daemon:
    """A daemon that is ready. ``ready`` is the line that it printed, and contains ``host`` and ``port``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self.ready = process.stdout.readline()
        assert self.ready.startswith("asyncdist store is ready at "), process.stderr.read()
        # A daemon that listens only at a socket file prints no tcp address.
        tcp = re.search(r"tcp://\[?(.+?)\]?:(\d+) ", self.ready)
        self.host, self.port = (tcp[1], int(tcp[2])) if tcp else ("", 0)

    def client(self, token: str | None = None) -> TCPStore:
        """Return a client that does not reconnect."""
        return TCPStore(self.host, self.port, timeout=LIMIT, config=Config(token=token, store_reconnect=0.0))

    def ask(self, *arguments: str, code: int = 0, stdin: str | None = None) -> str:
        """Run a command that queries this daemon; see `asked`."""
        return asked("--port", str(self.port), *arguments, code=code, stdin=stdin)

    def end(self) -> tuple[int, str]:
        """Wait until the daemon ends; return its exit code and its standard error."""
        printed, error = self.process.communicate(timeout=LIMIT)
        assert printed == "", printed
        return self.process.returncode, error

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; return what `end` returns."""
        self.process.send_signal(number)
        return self.end()


@contextmanager
def started(
    *arguments: str,
    before: Callable[[], object] | None = None,
    program: Collection[str] = (),
    fds: Collection[int] = (),
    **settings: str,
) -> Iterator[Daemon]:
    """Start a daemon. At the end of the block it is killed if it still runs.

    The process first calls ``before``, inherits ``fds``, and executes ``program`` instead of `command` if there is one.
    """
    process = subprocess.Popen(
        [*program] or command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**settings),
        preexec_fn=before,
        pass_fds=fds,
    )
    try:
        yield Daemon(process)
    finally:
        process.kill()
        process.communicate()
