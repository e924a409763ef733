"""Write `asyncdist/groups/blocking_api.py` from `collectives_api.py`; with ``--check`` only compare. `make lint` does that.

A collective with the argument ``async_op`` gets three declarations: for False, for True, and for a value that is not known
before the program runs. The result of the others is what `BlockingApi._value` or `BlockingApi._finish` returns.
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

GROUPS = Path(__file__).parent.parent / "asyncdist/groups"
SOURCE, TARGET = GROUPS / "collectives_api.py", GROUPS / "blocking_api.py"
BOUNDS = {"TensorT": "TensorLike", "TensorsT": "Sequence[TensorLike]", "TensorListsT": "Sequence[Sequence[TensorLike]]"}

HEAD = '''"""The collectives that `asyncdist.sync` exports: they return None, or a `Work` with ``async_op=True``.

`.ci/blocking_api.py` writes this file, with one line for each declaration, from `collectives_api`, which defines and
documents the functions. The declarations have the same arguments and the results of the blocking API, for type checkers
alone; `blocking_help` shows these results to readers.
"""
# fmt: off
# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from asyncdist.groups.blocking_help import with_blocking_help
from asyncdist.groups.collectives_api import CollectivesApi
from asyncdist.kernel.engine.work import DONE

if TYPE_CHECKING:
    from asyncdist.base.deadline import Timeout
    from asyncdist.base.ops import ReduceOp
    from asyncdist.groups.default_world import AnyGroup
    from asyncdist.groups.group import Group
    from asyncdist.groups.members.regrouping import Agreed
    from asyncdist.kernel.engine.work import Work
    from asyncdist.kernel.memory.tensor_types import ReductionLike, TensorLike, TensorListsT, TensorsT, TensorT


@with_blocking_help
class BlockingApi(CollectivesApi):
    """A `CollectivesApi` whose calls block unless ``async_op=True``."""

    _background = None

    def _finish(self, work: Work, async_op: bool) -> Work | None:
        if async_op:
            return work
        if work is not DONE and not work.is_success():
            work.result()
        return None

    def _value(self, work: Work) -> Any:
        return work.result()

    if TYPE_CHECKING:
'''


def declarations(method: ast.FunctionDef) -> list[str]:
    """Return what the blocking API declares for a method of `CollectivesApi`; nothing if it returns a work at once."""
    assert method.returns is not None
    awaited, body = ast.unparse(method.returns), "\n".join(map(ast.unparse, method.body))
    arguments = re.sub(r"(?<=\w)=", " = ", ast.unparse(method.args))
    any_tensor = re.sub(r"\bTensor(s|Lists|)T\b", lambda found: BOUNDS[found[0]], arguments)
    if "async_op: bool = False" in arguments:
        forms = [
            (any_tensor.replace("async_op: bool", "async_op: Literal[False]"), "None"),
            (arguments.replace("async_op: bool = False", "*, async_op: Literal[True]"), awaited),
            (arguments, f"{awaited} | None"),
        ]
    elif "self._value(" in body:
        forms = [(any_tensor, awaited.removeprefix("Work[").removesuffix("]"))]
    elif "self._finish(" in body:
        forms = [(any_tensor, "None")]
    else:
        return []
    lines = []
    for parameters, result in forms:
        lines += ["@overload"] * (len(forms) > 1) + [f"def {method.name}({parameters}) -> {result}: ..."]
    return lines


def generated() -> str:
    """Return the text of the file."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    (api,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "CollectivesApi")
    methods = [node for node in api.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return HEAD + "".join(f"        {line}\n" for method in methods for line in declarations(method))


def main() -> None:
    """Write the file, or exit with a message if it is not what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    text = generated()
    if not parser.parse_args().check:
        TARGET.write_text(text, encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != text:
        raise SystemExit(f"{TARGET} is not what its source says: run python .ci/{Path(__file__).name}")


if __name__ == "__main__":
    main()
