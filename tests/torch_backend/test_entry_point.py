"""The entry point by which torch 2.14 and later find the back end without an import of asyncdist."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from torch.distributed import Backend

from asyncdist.torch_backend.registration import register_backend

PROGRAM = """
import sys

import torch
import torch.distributed as dist

assert not any(name.startswith("asyncdist") for name in sys.modules)
dist.init_process_group("asyncdist", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(dist.get_backend(), type(dist.group.WORLD).__module__, tensor.tolist())
dist.destroy_process_group()
"""


def test_entry_point_loads_the_registration() -> None:
    (entry,) = entry_points(group="torch.distributed.backends", name="asyncdist")
    assert entry.load() is register_backend


@pytest.mark.skipif(not hasattr(Backend, "_ensure_backend_registered"), reason="torch before 2.14 has no entry point")
def test_program_needs_no_import_of_asyncdist() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert done.stdout == "asyncdist asyncdist.torch_backend.process_group [1.0, 1.0]\n"
