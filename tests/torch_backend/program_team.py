"""One rank of a team that lives through many tests: it makes its process group once and runs programs as it is told.

Forked by conftest.py. What it hears is the name of a programs_*.py beside it and of a function in that; what it says is
("done", pickled result) or ("raised", traceback). A program is a function of rank, world and
what else the test gives; it returns numbers, strings, tensors, and lists or mappings of them.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import random
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch._inductor.config
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))  # so that programs can be imported, and import what they share


def serve(test, backend, rank, world, meeting, group_timeout):
    """Run programs until the test hangs up."""
    enter(backend)
    dist.init_process_group(
        backend, init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=group_timeout)
    )
    while True:
        try:
            module, name, arguments, patience = test.recv()
        except EOFError:
            break
        test.send(outcome(module, name, (rank, world, *arguments), patience))
    dist.destroy_process_group()


def enter(backend):
    """Make the process one that uses a back end: torch knows gloo by itself, and ours once it is imported."""
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # or every rank would start processes for it
    torch._inductor.config.cpp.vec_isa_ok = False  # or each set of instructions would be tried out, for seconds
    if backend == "asyncdist":
        import asyncdist.torch_backend  # noqa: F401


def outcome(module, name, arguments, patience):
    """Run one program; should it not end, say soon after its time where every thread is."""
    faulthandler.dump_traceback_later(patience, exit=False)
    try:
        torch.manual_seed(0)
        random.seed(0)
        result = getattr(importlib.import_module(module), name)(*arguments)
        dist.barrier()
        return "done", pickle.dumps(result)
    except Exception:
        return "raised", traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
        leave_groups()
        sys.stdout.flush()


def leave_groups():
    """Destroy the groups that the program made, and leave that of all ranks."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def end(test, *results):
    """Say the last words of a rank whose death is the point, and die as a machine that loses power does."""
    test.send(results)
    os._exit(7)
