"""Dumps of the flight recorders of a process on a signal (``ASYNCDIST_DUMP_SIGNAL``).

They show the position of a job that seems to hang before its operations reach their deadlines.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

from asyncdist.config import Config
from asyncdist.errors import UsageError
from asyncdist.kernel.tracing.recorder import recorders

log = logging.getLogger("asyncdist")


def install_signal_handler(config: Config) -> None:
    """Install the handler of the configured signal, if there is one. Call it on the main thread.

    The handler calls the program's previous handler last. Raises UsageError for an invalid configuration.
    """
    name, folder = config.dump_signal, config.dump_dir
    if name is None:
        return
    try:
        number = signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise UsageError(f"ASYNCDIST_DUMP_SIGNAL={name} is no signal here: use USR2, or another of `kill -l`") from None
    if folder is None:
        raise UsageError(
            f"ASYNCDIST_DUMP_SIGNAL={name} says when to write the flight recorder: set ASYNCDIST_DUMP_DIR too"
        )
    before = signal.getsignal(number)
    if isinstance(before, _Writer):
        return
    if threading.current_thread() is not threading.main_thread():
        log.warning("signal %s will write no flight recorder: create the first world on the main thread", name)
        return
    try:
        signal.signal(number, _Writer(name, before))
    # The kernel lets no process handle KILL and STOP.
    except OSError:
        raise UsageError(f"ASYNCDIST_DUMP_SIGNAL={name} cannot be caught: use USR2, or another of `kill -l`") from None


class _Writer:
    """A signal handler that writes the recorders, and then calls the previous handler.

    A signal that arrives while the recorders are being written writes them no second time: signals that arrive faster
    than that would nest the handler without end.
    """

    def __init__(self, name: str, before: Any) -> None:
        self._name = name
        self._before = before
        self._writing = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._writing:
            self._writing = True
            try:
                for recorder in recorders():
                    if recorder.dump_dir is not None:
                        recorder.dump(recorder.dump_dir, f"requested by signal {self._name}")
            finally:
                self._writing = False
        if callable(self._before):
            self._before(number, frame)
