"""The exit and the fork of a process: the order of the registered calls, also after failures."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LONG = 20.0

pytestmark = pytest.mark.processes


def said_by(program, *args):
    ended = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=2 * LONG)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split(), ended.stderr


STAGES = """
import atexit
from asyncdist.base.lifecycle import Stage, at_exit, ending

def say(what):
    print(what, flush=True)

def fail():
    say("fails")
    raise ValueError("a mistake")

atexit.register(say, f"ends:{ending()}")
at_exit(Stage.LOOP, lambda: say("loop"))
at_exit(Stage.PEERS, lambda: say(f"peers:{ending()}"))
at_exit(Stage.COMMUNICATORS, lambda: say("communicators"))
at_exit(Stage.SERVERS, lambda: say("server"))
at_exit(Stage.SERVERS, fail)
at_exit(Stage.THREADS, lambda: say("threads"))
at_exit(Stage.SERVERS, lambda: say("later-server"))
"""


def test_exit_stages_run_in_order_also_after_a_failure():
    said, errors = said_by(STAGES)
    assert said == """ends:False communicators later-server fails server peers:True threads loop""".split()
    assert errors.count("ValueError: a mistake") == 1


IMPORTS = """
import importlib, sys
from asyncdist.base import lifecycle

class Holder:
    def end_with_process(self):
        print("mesh")

register, holder = lifecycle.at_exit, Holder()
lifecycle.register_hooks(holder)
lifecycle.at_exit = lambda stage, call: register(stage, lambda: (print(call.__module__), call()))
for module in sys.argv[1:]:
    importlib.import_module(module)
"""

IN_ORDER = ["asyncdist_transports.nccl.communicator", "asyncdist.store.server.embedded", "mesh",
            "asyncdist.base.daemon_threads", "asyncdist.base.background_loop"]  # fmt: skip


@pytest.mark.parametrize("turned", [1, -1])
def test_exit_order_does_not_depend_on_import_order(turned):
    said, errors = said_by(IMPORTS, *[name for name in IN_ORDER[::turned] if name != "mesh"])
    assert said == IN_ORDER
    assert errors == ""


CHILDREN = """
import asyncdist.store
import multiprocessing, sys
from asyncdist.base import lifecycle

class Holder:
    def end_with_process(self):
        goodbye.set()

    def after_fork_in_child(self):
        pass

if __name__ == "__main__":
    processes = multiprocessing.get_context("fork")
    goodbye, holder = processes.Event(), Holder()
    lifecycle.register_hooks(holder)
    processes.Process(target=lambda: print(goodbye.wait(float(sys.argv[1])), flush=True)).start()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
def test_peers_are_notified_before_children_are_joined():
    assert said_by(CHILDREN, str(LONG))[0] == ["True"]


FORK = """
import os
from asyncdist.base import lifecycle

def fail():
    print("fails", flush=True)
    raise ValueError("a mistake")

class Holder:
    def after_fork_in_child(self):
        print("left", flush=True)

holder = Holder()
lifecycle.after_fork(fail)
lifecycle.after_fork(lambda: print("last", flush=True))
lifecycle.register_hooks(holder)
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
lifecycle.unregister_hooks(holder)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
def test_after_fork_calls_run_in_order_in_the_child_only():
    said, errors = said_by(FORK)
    assert said == ["left", "fails", "last"]
    assert errors.count("ValueError: a mistake") == 1
