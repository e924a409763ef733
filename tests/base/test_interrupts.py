"""What Python prints of a KeyboardInterrupt that was raised inside a call of this package, and of others."""

import asyncio
import logging
import signal
import sys
import threading
import traceback

import pytest

from asyncdist.base import interrupts
from asyncdist.base.background_loop import background_loop
from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.kernel.engine.drivers.home_loop import LoopShutdownHook
from asyncdist.testing.cluster import world_of

NOTE = "frames of asyncdist and asyncio are left out: ASYNCDIST_DEBUG=1 shows them"


@pytest.fixture
def printed(monkeypatch):
    """Return what is printed of the KeyboardInterrupt that a function raises; the exception itself stays as it is."""
    shown = []
    monkeypatch.delenv("ASYNCDIST_DEBUG", raising=False)
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, entries: shown.append((error, entries)))
    monkeypatch.setattr(interrupts, "is_installed", False)
    interrupts.shorten_interrupts()
    interrupts.shorten_interrupts()

    def printed(raises):
        with pytest.raises(KeyboardInterrupt) as caught:
            raises()
        whole = traceback.format_exception(caught.value)
        sys.excepthook(KeyboardInterrupt, caught.value, caught.value.__traceback__)
        ((error, entries),) = shown
        assert error.__traceback__ is entries
        assert traceback.format_exception(caught.value) == whole
        return "".join(traceback.format_exception(error))

    return printed


def raise_interrupt():
    raise KeyboardInterrupt


def waits_in_the_package():
    """Wait for a background thread, in a function of the standard library that this package calls."""

    async def interrupts_the_caller():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        await asyncio.sleep(60.0)

    background_loop().run(interrupts_the_caller())


def test_frames_of_the_package_and_of_what_it_calls_are_left_out(printed):
    text = printed(waits_in_the_package)
    assert "in waits_in_the_package" in text
    assert "background_loop.py" not in text
    assert "concurrent" not in text
    assert text.endswith(f"KeyboardInterrupt\n{NOTE}\n")
    assert text.count("Traceback") == 1


def test_interrupt_that_cancelled_a_coroutine_shows_one_traceback_with_the_line_that_waited(printed):
    async def waits():
        async with world_of(2) as groups:
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            await groups[0].barrier()  # the other rank never comes

    text = printed(lambda: asyncio.run(waits()))
    assert "await groups[0].barrier()" in text
    assert text.count("Traceback") == 1
    assert "asyncio/" not in text
    assert text.endswith(f"KeyboardInterrupt\n{NOTE}\n")


def test_second_interrupt_in_the_programs_own_handler_shows_both_without_our_frames(printed):
    def cleans_up():
        try:
            waits_in_the_package()
        finally:
            waits_in_the_package()

    text = printed(cleans_up)
    assert text.count("Traceback") == text.count(NOTE) == 2
    assert "background_loop.py" not in text


def test_interrupt_outside_the_package_is_printed_whole(printed):
    async def waits():
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await asyncio.sleep(60.0)

    text = printed(lambda: asyncio.run(waits()))
    assert "asyncio/" in text
    assert NOTE not in text


def test_debug_setting_shows_all_frames(printed, monkeypatch):
    monkeypatch.setenv("ASYNCDIST_DEBUG", "1")
    text = printed(waits_in_the_package)
    assert "background_loop.py" in text
    assert NOTE not in text


def test_second_interrupt_does_not_disturb_the_printing_of_the_first(printed, monkeypatch):
    monkeypatch.setattr(interrupts, "hook_before", lambda *arguments: signal.raise_signal(signal.SIGINT))
    handler = signal.getsignal(signal.SIGINT)
    interrupts.print_error(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert signal.getsignal(signal.SIGINT) is handler


def test_other_exceptions_are_printed_as_they_are(printed, monkeypatch):
    shown = []
    monkeypatch.setattr(interrupts, "hook_before", lambda *arguments: shown.append(arguments))
    error = ValueError()
    sys.excepthook(ValueError, error, None)
    assert shown == [(ValueError, error, None)]


def test_interrupt_while_a_loop_shuts_down_is_raised_and_not_logged_as_a_failed_task(caplog):
    async def main():
        hooks.append(LoopShutdownHook(raise_interrupt))

    hooks = []
    with caplog.at_level(logging.ERROR), pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    hooks.clear()
    assert not caplog.records


def test_thread_of_a_pool_whose_start_was_interrupted_ends_without_an_error(monkeypatch, until):
    def start(thread):
        started(thread)
        raise KeyboardInterrupt

    failed, started = [], threading.Thread.start
    monkeypatch.setattr(threading, "excepthook", failed.append)
    pool = DaemonThreadPool("interrupted", max_threads=1, idle_timeout=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(int)
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("interrupted")])
    assert not failed
    assert pool.submit(int).result(20.0) == 0
    pool.shutdown()
