"""torchrun's way to us: the entry point ``asyncdist`` of ``torchrun.handlers``, for ``torchrun --rdzv-backend=asyncdist``.

torch loads every such entry point whenever its elastic package is imported, in programs that have nothing to do with us
too. So nothing is imported here until a handler is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def handler() -> Callable[[Any], Any]:
    """Return what makes torchrun's rendezvous handler of its parameters."""
    return _make


def _make(parameters: Any) -> Any:
    from asyncdist.torch_backend.rendezvous_handler import make_handler

    return make_handler(parameters)
