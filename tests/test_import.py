"""What ``import asyncdist`` loads: a program pays for a name when it first uses it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
before = set(sys.modules)
import asyncdist
print(*sorted(name for name in set(sys.modules) - before if name not in sys.stdlib_module_names))
"""


def test_import_loads_no_other_module_of_the_package_or_of_another_one() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    # Those of the standard library's packages are loaded with them.
    loaded = {name for name in done.stdout.split() if name.split(".")[0] not in sys.stdlib_module_names}
    assert loaded == {"asyncdist"}
