"""Run a script of accelerate.test_utils, or some of its functions: ``accelerate_script.py SCRIPT [FUNCTION...]``."""

import importlib
import sys

import torch.distributed as dist
from regression import report

import asyncdist.torch_backend

dist.init_process_group("asyncdist")
_, script, *functions = sys.argv
module = importlib.import_module(f"accelerate.test_utils.scripts.{script}")
report()  # main destroys the process group
for function in functions or ["main"]:
    print(f"-- {function}", flush=True)
    getattr(module, function)()
