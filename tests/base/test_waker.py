"""The descriptor that wakes a thread from its poll."""

from __future__ import annotations

import errno
import os

import pytest

from asyncdist.base.waker import Waker


@pytest.mark.parametrize("call", ["eventfd", "pipe"])
def test_process_without_a_free_descriptor_gets_the_error_alone(monkeypatch, call):
    """An exception in ``__del__`` is a warning, and so an error of this test."""

    def fail(*_):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.delattr(os, "eventfd")
    monkeypatch.setattr(os, call, fail, raising=False)
    with pytest.raises(OSError, match="too many"):
        Waker()
