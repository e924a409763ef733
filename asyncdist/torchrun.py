"""The entry point ``asyncdist`` in the group ``torchrun.handlers``, for ``torchrun --rdzv-backend=asyncdist``.

Only torch calls it. When a program imports torch's elastic package, torch imports this module and calls `handler`, also
in programs that do not use asyncdist. At module level it therefore imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def handler() -> Callable[[Any], Any]:
    """Return the function that creates the rendezvous handler. torchrun calls it if asyncdist is its back end."""
    return _create_handler


def _create_handler(parameters: Any) -> Any:
    from asyncdist.torch_backend.rendezvous.rendezvous_handler import make_handler

    return make_handler(parameters)
