"""One rank of a team: it initializes its process group once and runs the programs that conftest.py sends.

conftest.py forks the rank and sends the names of a programs_*.py in this folder and of a function in it. The rank replies
("done", pickled result) or ("raised", traceback). A program takes the rank, the world size and the arguments of the test;
it returns numbers, strings, tensors, and lists or mappings of them.
"""

import faulthandler
import importlib
import pickle
import random
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._inductor import config as inductor

# Programs are imported by name, and import toys.py by name.
sys.path.insert(0, str(Path(__file__).parent))


def serve(test, backend, rank, world, meeting, group_timeout):
    """Run programs until the test closes its pipe."""
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
    """Prepare the process for a backend; asyncdist is registered by its import."""
    torch.set_num_threads(1)
    # With more threads every rank starts compiler processes.
    inductor.compile_threads = 1
    # Probing each instruction set takes seconds.
    inductor.cpp.vec_isa_ok = False
    if backend == "asyncdist":
        import asyncdist.torch_backend  # noqa: F401


def outcome(module, name, arguments, patience):
    """Run one program; print the stack of every thread if it does not end within ``patience`` seconds."""
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
    """Destroy the groups that the program created, but not the world."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
