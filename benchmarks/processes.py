"""Ranks as real processes that a test starts, exchanges values with, stops and kills.

A `Nursery` is a process that imports torch and asyncdist once and then forks a rank in milliseconds. A rank runs one
function of a program file, whose first argument is the rank's end of a pipe. The test and the rank report their progress
over the pipe, so that no test has to sleep::

    with Nursery() as nursery:
        ranks = [nursery.start("program.py", "train", rank) for rank in range(4)]   # def train(test, rank): ...
        assert ranks[0].hear() == "in the call"                                     # test.send("in the call")
        ranks[1].kill()
        assert ranks[0].wait() == 0
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Self

PATIENCE = 60.0
"""The default of seconds after which waiting for a rank is an error. No test needs as many."""


def _runs(task: Path) -> bool:
    try:
        return task.read_bytes().rpartition(b") ")[2][:1] not in b"TtZX"
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return False


class RankEndedError(AssertionError):
    """A rank ended while the test waited for a value from it."""


class RankProcess:
    """One forked rank, seen from the test. ``pid`` is its process id."""

    def __init__(self, nursery: Nursery, pid: int, pipe: Connection, output: Any) -> None:
        self.pid = pid
        self._nursery = nursery
        self._pipe = pipe
        self._output = output

    def say(self, value: Any) -> None:
        """Send a value, which ``test.recv()`` returns in the rank."""
        self._pipe.send(value)

    def hear(self, timeout: float = PATIENCE) -> Any:
        """Return the next value that the rank sends.

        Raises:
            RankEndedError: The rank ends first. The message has its output.
            TimeoutError: No value arrives within ``timeout`` seconds.
        """
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"process {self.pid} sent nothing for {timeout:g} s; its output: {self.output()}")
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise RankEndedError(f"the rank ended with status {self.wait()}; its output: {self.output()}") from None

    def fileno(self) -> int:
        """Return the descriptor that is readable when the rank has sent a value or has ended, for `select` and the like."""
        return self._pipe.fileno()

    def kill(self) -> None:
        """Kill the rank with SIGKILL, as a power failure would: none of its handlers run."""
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop the rank with SIGSTOP, like a suspended machine, and return when none of its threads runs any more."""
        os.kill(self.pid, signal.SIGSTOP)
        while any(_runs(task) for task in Path(f"/proc/{self.pid}/task").glob("*/stat")):
            time.sleep(0.001)

    def resume(self) -> None:
        """Continue a stopped rank with SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        os.kill(self.pid, signal.SIGINT)

    def wait(self, timeout: float = PATIENCE) -> int:
        """Wait until the rank ends, and return its exit status: the negative number of the signal if one killed it."""
        return self._nursery.status(self, timeout)

    def output(self) -> str:
        """Return the rank's standard output and error so far."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def close(self) -> None:
        """Close the pipe and the output."""
        self._pipe.close()
        self._output.close()


class Nursery:
    """Forks ranks from a process that has imported the modules ``preload``. Closing it kills the ranks that still run."""

    def __init__(self, preload: Sequence[str] = ("torch", "asyncdist", "asyncdist.sync")) -> None:
        self._control, theirs = Pipe()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), *preload]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._statuses: dict[int, int] = {}
        self.waited: dict[int, float] = {}
        """By process id of the ranks that have ended: for how many seconds each has waited for a processor."""
        self._ranks: list[RankProcess] = []
        self._has_imported = False

    def start(
        self, program: str | Path, function: str, *args: Any, environment: Mapping[str, str] | None = None
    ) -> RankProcess:
        """Fork a rank that calls ``function(test, *args)`` of a program file, with additional environment variables.

        A rank that returns ends after its threads and exit handlers, and does not free its modules, which takes a third
        of a second of a processor. One that raises SystemExit ends as any program does.
        """
        ours, theirs = Pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115  # RankProcess.close closes it
        with theirs:
            self._control.send((str(program), function, args, dict(environment or {})))
            with _socket_of(self._control) as control:
                socket.send_fds(control, [b"0"], [theirs.fileno(), output.fileno()])
        pid = self._next(PATIENCE, expected="forked")
        rank = RankProcess(self, pid, ours, output)
        self._ranks.append(rank)
        return rank

    def status(self, rank: RankProcess, timeout: float) -> int:
        """Wait until a rank ends, and return its exit status."""
        while rank.pid not in self._statuses:
            try:
                self._next(timeout, expected="ended")
            except TimeoutError:
                raise TimeoutError(
                    f"process {rank.pid} has not ended within {timeout:g} s; its output: {rank.output()}"
                ) from None
        return self._statuses[rank.pid]

    def _next(self, timeout: float, *, expected: str) -> int:
        while True:
            # On a busy machine the imports may take any time. An error among them ends the process, and thus the pipe.
            if not self._control.poll(timeout if self._has_imported else None):
                raise TimeoutError(f"the nursery did not report {expected!r} within {timeout:g} s")
            event, pid, status, waited = self._control.recv()
            self._has_imported = True
            if event == "ended":
                self._statuses[pid], self.waited[pid] = status, waited
            if event == expected:
                return int(pid)

    @property
    def running(self) -> list[RankProcess]:
        """The ranks that have not ended, as far as the nursery has told."""
        return [rank for rank in self._ranks if rank.pid not in self._statuses]

    def clear(self) -> None:
        """Kill the ranks that still run, and wait until they end. Call it at the end of each test."""
        for rank in self.running:
            with contextlib.suppress(ProcessLookupError):
                rank.kill()
        for rank in self._ranks:
            rank.wait()
            rank.close()
        self._ranks.clear()
        self._statuses.clear()
        self.waited.clear()

    def close(self) -> None:
        """Kill the ranks that still run, and end the forking process."""
        if not self._control.closed:
            self.clear()
            self._control.close()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _socket_of(control: Connection) -> socket.socket:
    """Return the socket of a pipe under a second descriptor."""
    # multiprocessing.reduction awaits an answer since Python 3.14, and would take a report of the nursery for it.
    return socket.socket(fileno=os.dup(control.fileno()))


# -- in the nursery's process ---------------------------------------------------------------------


class _Job:
    """A request for a rank: the program of the rank, its pipe and its output."""

    def __init__(self, control: Connection) -> None:
        self.program, self.function, self.args, self.environment = control.recv()
        with _socket_of(control) as descriptors:
            _, received, _, _ = socket.recv_fds(descriptors, 1, 2)
        if len(received) < 2:
            raise EOFError
        pipe, self.output = received
        self.pipe = Connection(pipe)

    def run(self) -> None:
        """Run the rank's program in the forked process."""
        os.dup2(self.output, 1)
        os.dup2(self.output, 2)
        os.close(self.output)
        os.environ.update(self.environment)
        runpy.run_path(self.program)[self.function](self.pipe, *self.args)

    def close(self) -> None:
        """Close the nursery's copies of the descriptors, so that the pipe ends when the rank ends."""
        self.pipe.close()
        os.close(self.output)


def _serve(control: Connection) -> _Job | None:
    """Fork until the test closes the connection; return a job in each child, and None in the parent."""
    children: set[int] = set()
    signalled, wakeup = socket.socketpair()
    signalled.setblocking(False)
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector, signalled, wakeup:
        selector.register(control, selectors.EVENT_READ)
        selector.register(signalled, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if signalled in ready:
                signalled.recv(4096)
                _report_ended(control, children)
            if control in ready:
                try:
                    job = _Job(control)
                except EOFError:  # the test has ended
                    for pid in children:
                        os.kill(pid, signal.SIGKILL)
                    return None
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    control.close()
                    return job
                children.add(pid)
                job.close()
                control.send(("forked", pid, 0, 0.0))


def _report_ended(control: Connection, children: set[int]) -> None:
    for child in list(children):
        waited = 0.0
        with contextlib.suppress(OSError):  # unknown after waitpid
            waited = waiting_time(Path(f"/proc/{child}/task/{child}"))
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid != 0:
            children.discard(pid)
            with contextlib.suppress(BrokenPipeError):
                control.send(("ended", pid, os.waitstatus_to_exitcode(status), waited))


def waiting_time(thread: Path) -> float:
    """Return for how many seconds a thread, a folder of Linux, has waited for a processor. Raises OSError."""
    return int((thread / "schedstat").read_text().split()[1]) / 1e9


def _run_nursery(descriptor: str, *preload: str) -> None:
    control = Connection(int(descriptor))
    for name in preload:
        __import__(name)
    gc.collect()
    # A rank's garbage collector would otherwise write to the shared pages, and so copy them.
    gc.freeze()
    try:
        control.send(("imported", 0, 0, 0.0))
    except BrokenPipeError:  # nothing was started
        return
    job = _serve(control)
    if job is None:
        os._exit(0)  # nothing is left to do, and the end of the interpreter takes long
    job.run()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _run_nursery(*sys.argv[1:])
