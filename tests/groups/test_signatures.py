"""The collectives' annotations and docstrings: of both APIs, equal where they must be, and with examples that run."""

import ast
import asyncio
import inspect
import re
import subprocess
import sys
import textwrap
import typing
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import asyncdist
import asyncdist.sync
from asyncdist.groups import blocking_api, collectives_api
from asyncdist.groups.collectives_api import CollectivesApi

COLLECTIVES = [name for name, value in vars(CollectivesApi).items() if inspect.isfunction(value) and name[0] != "_"]
SAME_IN_BOTH_APIS = {"isend", "irecv", "batch_isend_irecv"}
NEVER_ASYNC = {"recv": "int", "recv_object_list": "int", "agree": "Agreed", "regroup": "Group"}


def methods(module, name):
    """Return the methods of a class by name; overloads are several of one name."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    (owner,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {}
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            found.setdefault(node.name, []).append(node)
    return found


AWAITED = {name: one for name, (one,) in methods(collectives_api, "CollectivesApi").items()}
BLOCKING = methods(blocking_api, "BlockingApi")


def test_blocking_api_declares_every_collective_whose_result_differs():
    assert {*BLOCKING} == {*AWAITED} - SAME_IN_BOTH_APIS


def test_blocking_api_is_what_its_script_writes():
    script = Path(asyncdist.__file__).parent.parent / ".ci/blocking_api.py"
    subprocess.run([sys.executable, script, "--check"], check=True)


@pytest.mark.parametrize("name", BLOCKING)
def test_blocking_api_declares_none_or_the_awaited_result(name):
    awaited = ast.unparse(AWAITED[name].returns)
    declared = [ast.unparse(one.returns) for one in BLOCKING[name]]
    if "async_op" in inspect.signature(getattr(CollectivesApi, name)).parameters:
        assert declared == ["None", awaited, f"{awaited} | None"]
    else:
        assert declared == [NEVER_ASYNC.get(name, "None")]
    assert inspect.signature(getattr(asyncdist.sync, name)).return_annotation == declared[-1]  # what help() shows


@pytest.mark.parametrize("name", COLLECTIVES)
def test_annotations_of_the_collective_resolve_at_run_time(name):
    hints = typing.get_type_hints(getattr(asyncdist, name))
    assert hints["return"] == list[asyncdist.Work[typing.Any]] or hints["return"].__origin__ is asyncdist.Work


@pytest.mark.parametrize("name", COLLECTIVES)
def test_docstring_has_arguments_result_errors_and_example(name):
    text = inspect.getdoc(getattr(asyncdist, name))
    of_both, blocking = text[: text.index("Example:")], inspect.getdoc(getattr(asyncdist.sync, name))
    assert blocking.startswith(of_both)
    assert "await" not in blocking[len(of_both) :]
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == ["Args", "Returns", "Raises", "Example"]
    arguments = text[text.index("Args:") : text.index("Returns:")]
    assert re.findall(r"^    (\w+):", arguments, re.MULTILINE) == [
        *inspect.signature(getattr(asyncdist, name)).parameters
    ]


def example_of(name, api=asyncdist):
    text = inspect.getdoc(getattr(api, name))
    lines = [line.strip() for line in text[text.index("Example:") :].splitlines()[1:]]
    assert all(line.startswith((">>> ", "... ")) for line in lines)
    return "\n".join(line[4:] for line in lines)


@asynccontextmanager
async def one_rank():
    """The default process group of one rank."""
    await asyncdist.init_process_group(store=asyncdist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        await asyncdist.destroy_process_group()


@pytest.mark.parametrize("name", COLLECTIVES)
async def test_example_of_the_docstring_runs(name):
    scope = {"dist": asyncdist, "torch": torch, "asyncio": asyncio}
    exec("async def example():\n" + textwrap.indent(example_of(name), "    "), scope)
    async with one_rank():
        await scope["example"]()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_example_of_the_blocking_docstring_runs(name):
    asyncdist.sync.init_process_group(store=asyncdist.HashStore(), rank=0, world_size=1)
    try:
        exec(example_of(name, asyncdist.sync), {"dist": asyncdist.sync, "torch": torch})
    finally:
        asyncdist.sync.destroy_process_group()


def outputs(make):
    """Yield collectives of one rank: the name, the argument that is the result, and the arguments."""
    one, other = make(), make()
    yield "all_reduce", one, (one,)
    yield "reduce", one, (one, 0)
    yield "broadcast", one, (one, 0)
    yield "scatter", one, (one, [other])
    yield "reduce_scatter", one, (one, [other])
    yield "reduce_scatter_single", one, (one, other)
    yield "all_gather_single", one, (one, other)
    yield "all_to_all_single", one, (one, other)
    yield "gather_single", one, (other, one)
    several = [one]
    yield "all_reduce_coalesced", several, (several,)
    yield "all_gather", several, (several, other)
    yield "all_to_all", several, (several, [other])
    yield "gather", several, (other, several)
    yield "all_gather_coalesced", (nested := [[one]]), (nested, [other])


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(3), lambda: np.ones(3), lambda: torch.ones(2, 3).t()], ids=["torch", "numpy", "strided"]
)
async def test_value_is_the_output_that_was_passed(make):
    async with one_rank():
        for name, output, arguments in outputs(make):
            assert await getattr(asyncdist, name)(*arguments) is output, name
            assert await getattr(asyncdist.sync, name)(*arguments, async_op=True) is output, name
        assert await asyncdist.barrier() is None
