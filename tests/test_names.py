"""The public names of the package, and which of them two of its submodules share."""

from __future__ import annotations

import importlib
import pickle
from types import ModuleType

import asyncdist


def test_submodules_do_not_hide_public_names():
    for name in ("asyncdist.group", "asyncdist.reduce", "asyncdist.store"):
        assert isinstance(importlib.import_module(name), ModuleType)
    hidden = [name for name in asyncdist.__all__ if isinstance(getattr(asyncdist, name), ModuleType)]
    assert hidden == []
    assert asyncdist.group.WORLD is None
    assert callable(asyncdist.reduce)


def test_the_package_can_be_sent_with_functions_that_use_it():
    assert pickle.loads(pickle.dumps(asyncdist)) is asyncdist
