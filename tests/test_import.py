"""What ``import asyncdist`` and ``asyncdist.sync`` load: a program pays for a name when it first uses it."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest

PROGRAM = """
import sys
before = set(sys.modules)
import {name}
print(*sorted(name for name in set(sys.modules) - before if name not in sys.stdlib_module_names))
"""


@cache
def loaded_by(name: str) -> frozenset[str]:
    """Return the modules that a new interpreter loads with a module, except modules without a package."""
    command = [sys.executable, "-c", PROGRAM.format(name=name)]
    return frozenset(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_import_loads_no_other_module_of_the_package_or_of_another_one() -> None:
    # Those of the standard library's packages are loaded with them.
    loaded = {name for name in loaded_by("asyncdist") if name.split(".")[0] not in sys.stdlib_module_names}
    assert loaded == {"asyncdist"}


@pytest.mark.parametrize(
    "unneeded", ["elastic", "ddp", "rpc", "weights", "store.server", "store.persistence", "store.client.blocking"]
)
def test_blocking_api_loads_no_module_that_a_plain_rank_does_not_need(unneeded: str) -> None:
    loaded = loaded_by("asyncdist.sync")
    assert "asyncdist.groups.group" in loaded
    assert not [name for name in loaded if name.startswith(f"asyncdist.{unneeded}")]
