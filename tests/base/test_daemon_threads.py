"""Daemon threads for calls that may block: the pool, and the executor that keeps order."""

import asyncio
import functools
import multiprocessing
import sys
import threading
import weakref

import pytest

from asyncdist.base.daemon_threads import DaemonThreadPool, SerialExecutor

LONG = 60.0


@pytest.fixture
def pool():
    pool = DaemonThreadPool("pool", max_threads=3)
    yield pool
    pool.shutdown()


def threads_named(name):
    return [each for each in threading.enumerate() if each.name.startswith(name)]


async def test_pool_call_returns_its_value_or_raises(pool):
    assert pool.submit(max, 1, 2).result(LONG) == 2
    assert pool.submit(sorted, [1, 2], reverse=True).result(LONG) == [2, 1]
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(LONG)
    # A future of asyncio refuses StopIteration.
    with pytest.raises(RuntimeError, match=r"a call in a thread raised StopIteration\(\)"):
        await asyncio.wait_for(asyncio.wrap_future(pool.submit(next, iter(()))), LONG)


def test_pool_runs_as_many_calls_at_once_as_it_has_threads(pool):
    barrier, fourth_ran = threading.Barrier(4), threading.Event()
    calls = [pool.submit(barrier.wait, LONG) for _ in range(3)]
    fourth = pool.submit(fourth_ran.set)
    barrier.wait(LONG)  # three calls are running, and the fourth waits for a thread
    assert len({call.result(LONG) for call in calls}) == 3
    fourth.result(LONG)
    assert fourth_ran.is_set()


def test_pool_reuses_an_idle_thread(pool, until):
    names = set()
    for _ in range(5):
        pool.submit(lambda: names.add(threading.current_thread().name)).result(LONG)
        until(lambda: pool.num_idle == 1)
    assert names == {"pool_0"}


def test_pool_thread_ends_after_its_idle_timeout_and_another_starts(until):
    pool = DaemonThreadPool("short-lived", max_threads=1, idle_timeout=0.0)
    for _ in range(2):
        assert pool.submit(max, 1, 2).result(LONG) == 2
        until(lambda: not threads_named("short-lived"))


def test_pool_threads_are_daemons_and_end_with_shutdown(pool):
    pool.submit(int).result(LONG)
    (thread,) = threads_named("pool")
    assert thread.daemon
    pool.shutdown()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="has been shut down"):
        pool.submit(int)


def test_pool_shutdown_completes_the_submitted_calls(pool):
    proceed = threading.Event()
    calls = [pool.submit(proceed.wait, LONG) for _ in range(4)]
    assert pool.unfinished == set(calls)
    pool.shutdown(wait=False)
    proceed.set()
    assert [call.result(LONG) for call in calls] == [True] * 4
    assert pool.unfinished == set()


def test_pool_does_not_run_cancelled_calls_also_those_that_its_shutdown_cancels(pool):
    begun, proceed = threading.Barrier(4), threading.Event()
    calls = [pool.submit(lambda: begun.wait(LONG) >= 0 and proceed.wait(LONG)) for _ in range(3)]
    begun.wait(LONG)
    called = []
    late, cancelled = pool.submit(int), pool.submit(called.append, 1)
    assert cancelled.cancel()
    pool.shutdown(wait=False, cancel_futures=True)
    assert late.cancelled()
    proceed.set()
    assert [call.result(LONG) for call in calls] == [True] * 3
    pool.shutdown()
    assert called == []


def test_pool_that_grows_runs_calls_that_wait_for_calls_without_a_thread(until):
    pool = DaemonThreadPool("growing", max_threads=2, idle_timeout=0.0, grows=True)
    together = threading.Barrier(7)
    calls = [pool.submit(together.wait, LONG) for _ in range(7)]
    assert sorted(call.result(LONG) for call in calls) == list(range(7))
    until(lambda: not threads_named("growing"))
    assert pool.submit(max, 1, 2).result(LONG) == 2
    pool.shutdown()


def test_forked_child_drops_the_parents_calls_and_runs_its_own(pool):
    release, started = threading.Event(), threading.Event()
    pending = pool.submit(lambda: started.set() or release.wait(LONG))
    assert started.wait(LONG)
    processes = multiprocessing.get_context("fork")
    answers = processes.SimpleQueue()

    def in_child():
        unfinished = len(pool.unfinished)
        answers.put((unfinished, pool.submit(max, 1, 2).result(LONG)))

    child = processes.Process(target=in_child)
    child.start()
    assert answers.get() == (0, 2)
    child.join()
    assert pool.unfinished == {pending}
    release.set()
    assert pending.result(LONG)
    answers.close()


@pytest.fixture
def executor():
    """An executor whose idle thread does not end, and so could keep references."""
    executor = SerialExecutor("serial", idle_timeout=1000.0)
    yield executor
    executor.close(lambda: None)


@pytest.mark.parametrize(("call", "error"), [(sys.exit, "SystemExit"), (lambda: 1 / 0, "ZeroDivisionError")])
def test_executor_logs_a_call_that_raises_and_continues(executor, caplog, call, error):
    ended = threading.Event()
    executor.put(call)
    executor.put(ended.set)
    assert ended.wait(60)
    assert "a call in the executor 'serial' failed" in caplog.text
    assert error in caplog.text


def test_executor_never_overlaps_calls_and_keeps_each_threads_order(executor):
    done, inside, finished = [], threading.Lock(), threading.Semaphore(0)

    def call(thread, number):
        assert inside.acquire(blocking=False), "two calls at a time"
        done.append((thread, number))
        inside.release()
        finished.release()

    def put(thread):
        for number in range(200):
            executor.put(lambda number=number: call(thread, number), inline=number % 3 == 0)

    threads = [threading.Thread(target=put, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(finished.acquire(timeout=LONG) for _ in range(800))
    for thread in range(4):
        assert [number for one, number in done if one == thread] == list(range(200))


def test_executor_runs_a_call_inline_unless_one_is_pending(executor):
    where, proceed, ended = [], threading.Event(), threading.Event()
    executor.put(lambda: where.append(threading.current_thread()), inline=True)
    executor.put(proceed.wait)
    executor.put(lambda: where.append(threading.current_thread()), inline=True)  # returns at once: it is queued
    executor.put(ended.set)
    assert len(where) == 1
    proceed.set()
    assert ended.wait(60)
    assert where[0] is threading.current_thread()
    assert where[1].name == "serial_0"


def test_executor_keeps_no_reference_to_a_finished_call(executor, until):
    class Argument:
        def use(self):
            pass

    argument = Argument()
    seen = weakref.ref(argument)
    executor.put(functools.partial(argument.use))
    del argument
    until(lambda: seen() is None)


def test_executor_close_runs_the_last_call_and_ends_the_thread(until):
    executor, proceed, done = SerialExecutor("closing"), threading.Event(), []
    executor.put(proceed.wait)
    executor.put(lambda: done.append("call"))
    executor.close(lambda: done.append("last"))
    assert done == []
    proceed.set()
    until(lambda: not threads_named("closing"))
    assert done == ["call", "last"]
