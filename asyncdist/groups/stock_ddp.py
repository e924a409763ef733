"""Advice for programs that give a world of asyncdist to torch's own DistributedDataParallel.

Torch's DistributedDataParallel runs on process groups of torch.distributed only; the errors of torch do not say that
this package has one too. `default_world` installs the check with the first default world.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from asyncdist.errors import UsageError
from asyncdist.kernel.collectives.operations import CollectiveOps

_ADVICE = (
    "use asyncdist.DistributedDataParallel, which takes the same arguments; or keep torch's, import "
    'asyncdist.torch_backend, and call torch.distributed.init_process_group("asyncdist") instead'
)


@functools.cache
def install(lacks_torch_group: Callable[[], bool]) -> None:
    """Let torch's DistributedDataParallel refuse the groups of this package with advice.

    Args:
        lacks_torch_group: Returns whether asyncdist has a default group while torch.distributed has none.
    """
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        # `module` and `self` are positional; process_group is the seventh parameter of every supported torch.
        group = kwargs.get("process_group", args[6] if len(args) > 6 else None)
        if isinstance(group, CollectiveOps):
            raise UsageError(f"torch's DistributedDataParallel cannot use {group!r}, a group of asyncdist: {_ADVICE}")
        if group is None and kwargs.get("device_mesh") is None and lacks_torch_group():
            raise UsageError(
                "torch.distributed has no process group, only asyncdist has one, and this is torch's "
                f"DistributedDataParallel: {_ADVICE}"
            )
        original(self, *args, **kwargs)

    DistributedDataParallel.__init__ = checked  # type: ignore[method-assign]
