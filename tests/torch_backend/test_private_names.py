"""The private names of torch that the package uses are in the installed torch, and all of them are listed."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest
import torch

from asyncdist.kernel import c10d_private, torch_private

ROOT = Path(__file__).parents[2]
REQUIRED = {**torch_private.ATTRIBUTES, **c10d_private.ATTRIBUTES}
IN_SOME_RELEASES = c10d_private.OPTIONAL_ATTRIBUTES

OF_OTHERS = {"_asdict", "_exit", "_current_frames", "_get_running_loop", "_getframe"}
"""Names of the standard library."""


def text_of(place):
    """Return the source text of a module of torch, without importing it."""
    return Path(torch.__file__).parents[1].joinpath(*place.split(".")).with_suffix(".py").read_text("utf-8")


def holds(place, name):
    """Return whether an object or a module of torch has an attribute, or its source text mentions it."""
    owner, parts = torch, place.split(".")[1:]
    try:
        for depth, part in enumerate(parts, start=2):
            if not hasattr(owner, part):
                importlib.import_module(".".join(["torch", *parts][:depth]))
            owner = getattr(owner, part)
    except ImportError:
        return False
    return hasattr(owner, name) or name in inspect.getsource(owner)


@pytest.mark.parametrize("name", c10d_private.NAMES)
def test_torch_has_each_name_of_torch_distributed(name):
    if ".debug." in c10d_private.NAMES[name]:
        pytest.importorskip("jinja2")
        pytest.importorskip("tabulate")
        pytest.importorskip("aiohttp")
    assert getattr(c10d_private, name) is not None


def test_name_that_is_not_listed_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        c10d_private.unknown  # noqa: B018


def test_names_that_are_read_anew_follow_torch():
    assert not torch_private.is_profiler_enabled()
    with torch.profiler.profile():
        assert torch_private.is_profiler_enabled()
    assert torch_private.forward_ad_level() < 0
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.forward_ad_level() == 0


@pytest.mark.parametrize(("place", "name"), [(place, name) for place, names in REQUIRED.items() for name in names])
def test_torch_has_each_attribute(place, name):
    # Importing the compiler takes seconds.
    assert name in text_of(place) if place.startswith("torch._dynamo.") else holds(place, name)


def test_attributes_of_other_libraries_are_listed():
    """A private attribute that no module of the product defines is one of torch's, or of the standard library."""
    defined, read = set(), set()
    for path in [*ROOT.glob("asyncdist/**/*.py"), *ROOT.glob("transports/asyncdist_transports/**/*.py")]:
        if path.stem in ("torch_private", "c10d_private"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    defined.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Constant(value=str() as name):
                    defined.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "made" | "copy"), attr=name, ctx=ast.Store()):
                    defined.add(name)
                case ast.Attribute(attr=name):
                    read.add(name)
    unknown = {name for name in read - defined if name.startswith("_") and not name.startswith("__")}
    listed = {name for names in [*REQUIRED.values(), *IN_SOME_RELEASES.values()] for name in names}
    assert unknown - listed - OF_OTHERS == set(), "list them in ATTRIBUTES of torch_private or c10d_private"
