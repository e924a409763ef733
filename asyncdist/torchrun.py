"""The entry point ``asyncdist`` in the group ``torchrun.handlers``, for ``torchrun --rdzv-backend=asyncdist``.

torch loads every such entry point whenever its elastic package is imported, also in programs that do not use asyncdist.
This module therefore imports nothing until a handler is created.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def handler() -> Callable[[Any], Any]:
    """Return the factory of torchrun's rendezvous handler."""
    return _make


def _make(parameters: Any) -> Any:
    from asyncdist.torch_backend.rendezvous_handler import make_handler

    return make_handler(parameters)
