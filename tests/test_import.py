"""What ``import asyncdist`` and ``asyncdist.sync`` load: a program pays for a name when it first uses it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

PROGRAM = """
import sys
before = set(sys.modules)
import {name}
print(*sorted(name for name in set(sys.modules) - before if name not in sys.stdlib_module_names))
"""


def test_import_loads_no_other_module_of_the_package_or_of_another_one() -> None:
    command = [sys.executable, "-c", PROGRAM.format(name="asyncdist")]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    # Those of the standard library's packages are loaded with them.
    loaded = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    assert loaded == {"asyncdist"}


def test_blocking_api_loads_no_module_that_a_plain_rank_does_not_need(
    run_python: Callable[..., tuple[int, str]],
) -> None:
    status, output = run_python("-c", PROGRAM.format(name="asyncdist.sync"))
    assert (status, "asyncdist.groups.group" in output.split()) == (0, True)
    unneeded = "elastic", "ddp", "rpc", "weights", "store.server", "store.persistence", "store.client.blocking"
    prefixes = tuple(f"asyncdist.{name}" for name in unneeded)
    assert [name for name in output.split() if name.startswith(prefixes)] == []
