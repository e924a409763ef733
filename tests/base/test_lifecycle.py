"""The exit and the fork of a process: the order of the registered calls, also after failures."""

import os
import subprocess
import sys

import pytest

LONG = 60.0

pytestmark = pytest.mark.processes
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def run(program, *args):
    """Run a program; return the words that it printed, and its standard error."""
    ended = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=2 * LONG)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split(), ended.stderr


STAGES = """
import atexit
from asyncdist.base.lifecycle import Stage, at_exit, ending

def log(text):
    print(text, flush=True)

def fail():
    log("fails")
    raise ValueError("a mistake")

atexit.register(log, f"ends:{ending()}")
at_exit(Stage.LOOP, lambda: log("loop"))
at_exit(Stage.PEERS, lambda: log(f"peers:{ending()}"))
at_exit(Stage.COMMUNICATORS, lambda: log("communicators"))
at_exit(Stage.SERVERS, lambda: log("server"))
at_exit(Stage.SERVERS, fail)
at_exit(Stage.THREADS, lambda: log("threads"))
at_exit(Stage.SERVERS, lambda: log("later-server"))
"""


def test_exit_stages_run_in_order_also_after_a_failure():
    calls, errors = run(STAGES)
    assert calls == """ends:False communicators later-server fails server peers:True threads loop""".split()
    assert errors.count("ValueError: a mistake") == 1


INTERRUPTED = """
import signal, time
from asyncdist.base.lifecycle import Stage, at_exit

def interrupted():
    print("interrupted", flush=True)
    signal.raise_signal(signal.SIGINT)
    time.sleep(1000)

at_exit(Stage.SERVERS, interrupted)
at_exit(Stage.PEERS, lambda: print("peers", flush=True))
at_exit(Stage.LOOP, lambda: print("loop", flush=True))
"""


def test_interrupt_during_the_exit_ends_one_call_without_a_traceback():
    assert run(INTERRUPTED) == (["interrupted", "peers", "loop"], "")


IMPORTS = """
import importlib, sys
from asyncdist.base import lifecycle

class Hooked:
    def end_with_process(self):
        print("peers")

register, hooked = lifecycle.at_exit, Hooked()
lifecycle.register_hooks(hooked)
lifecycle.at_exit = lambda stage, call: register(stage, lambda: (print(call.__module__), call()))
for module in sys.argv[1:]:
    importlib.import_module(module)
"""

IN_ORDER = ["asyncdist_transports.nccl.communicator", "asyncdist.store.client.tcp_store", "asyncdist.store.client.file",
            "peers", "asyncdist.base.daemon_threads", "asyncdist.base.background_loop"]  # fmt: skip


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.exhaustive), -1])
def test_exit_order_does_not_depend_on_import_order(run_python, step):
    status, output = run_python("-c", IMPORTS, *[name for name in IN_ORDER[::step] if name != "peers"])
    assert (status, output.split()) == (0, IN_ORDER)


CHILDREN = """
import asyncdist.store
import multiprocessing, sys
from asyncdist.base import lifecycle

class Hooked:
    def end_with_process(self):
        goodbye.set()

    def after_fork_in_child(self):
        pass

if __name__ == "__main__":
    processes = multiprocessing.get_context("fork")
    goodbye, hooked = processes.Event(), Hooked()
    lifecycle.register_hooks(hooked)
    processes.Process(target=lambda: print(goodbye.wait(float(sys.argv[1])), flush=True)).start()
"""


@needs_fork
def test_peers_are_notified_before_children_are_joined():
    assert run(CHILDREN, str(LONG))[0] == ["True"]


FORK = """
import os
from asyncdist.base import lifecycle

def fail():
    print("fails", flush=True)
    raise ValueError("a mistake")

class Hooked:
    def after_fork_in_child(self):
        print("hook", flush=True)

hooked = Hooked()
lifecycle.after_fork(fail)
lifecycle.after_fork(lambda: print("last", flush=True))
lifecycle.register_hooks(hooked)
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
lifecycle.unregister_hooks(hooked)
"""


@needs_fork
def test_after_fork_calls_run_in_order_in_the_child_only():
    calls, errors = run(FORK)
    assert calls == ["hook", "fails", "last"]
    assert errors.count("ValueError: a mistake") == 1


HELD_DURING_FORK = """
import os, signal, threading
import asyncdist.kernel.devices.work, asyncdist.groups.group, asyncdist.kernel.tracing.hooks
from asyncdist.base import lifecycle
from asyncdist.base.background_loop import background_loop
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.memory.shared_arena import arena

held, forked = threading.Event(), threading.Event()
locks = [namespace[name] for namespace, name, _ in lifecycle._locks]

def hold():
    for lock in locks:
        lock.acquire()
    held.set()
    forked.wait()
    for lock in locks:
        lock.release()

class Hooked:
    def after_fork_in_child(self):
        work = Work()
        work.add_done_callback(lambda _: print("called", flush=True))
        work.finish()
        work.run_callbacks()

hooked = Hooked()
lifecycle.register_hooks(hooked)
arena()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    arena()
    print(background_loop().call(lambda: "runs"), flush=True)
    asyncdist.kernel.tracing.hooks.register_hook().remove()
    os._exit(0)
forked.set()
holder.join()
print("ended" if os.waitpid(child, 0)[1] == 0 else "killed")
lifecycle.unregister_hooks(hooked)
"""


@needs_fork
def test_child_has_new_locks_where_another_thread_held_the_parents(run_python):
    output = run_python("-c", HELD_DURING_FORK)[1]
    words = [line for line in output.splitlines() if " " not in line]  # from Python 3.12 on fork() warns of the threads
    assert words == ["called", "runs", "ended"], output
