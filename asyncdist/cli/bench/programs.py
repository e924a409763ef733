"""The processes that a benchmark starts: ranks and busy processes. Used by `launch`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

_TERMINATION = 5.0  # seconds between SIGTERM and SIGKILL
_LAST_NBYTES = 1 << 16  # of standard error, read for the last words

Program = subprocess.Popen[str]


class Programs:
    """Processes in sessions of their own, with one file for their standard error; a context manager that ends them."""

    def __init__(self) -> None:
        self.running: list[Program] = []
        self._stack = contextlib.ExitStack()
        self._stderr = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        self._stack.callback(self.end)

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(self, command: Sequence[str], **streams: Any) -> Program:
        """Start a command in a session of its own, so that Ctrl-C does not reach it; ``streams`` are for `Popen`."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, **streams}
        program = subprocess.Popen(command, stderr=self._stderr, start_new_session=True, text=True, **streams)
        self.running.append(program)
        return program

    def last_words(self) -> str:
        """Return the last lines on standard error as the end of a sentence."""
        # The processes share the offset of the file: reading at it would move the place where they write.
        number = self._stderr.fileno()
        start = max(0, os.fstat(number).st_size - _LAST_NBYTES)
        lines = os.pread(number, _LAST_NBYTES, start).decode(errors="replace").strip().splitlines()[-12:]
        return ":\n" + "\n".join(lines) if lines else ", and wrote nothing to standard error"

    def end(self, *programs: Program) -> None:
        """End some processes, by default all, and the processes that they started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            alive = [program for program in programs or self.running if program.poll() is None]
            for program in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, number)
            for program in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.wait(_TERMINATION)
        for program in programs or self.running:
            for stream in (program.stdin, program.stdout):
                with contextlib.suppress(OSError):
                    if stream is not None:
                        stream.close()


_COMPUTE = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


def busy_process() -> list[str]:
    """Return the command of a process that computes until it is ended, or until this process ends."""
    return [sys.executable, "-I", "-S", "-c", _COMPUTE]


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]
