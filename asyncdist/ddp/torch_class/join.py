"""How a wrapped model takes part in torch's context `torch.distributed.algorithms.Join`. Used by `module`."""

from __future__ import annotations

from typing import Any

from asyncdist.ddp.uneven_inputs import Joining, StepKind
from asyncdist.errors import UsageError


class TorchJoinHook:
    """The hook that torch's `torch.distributed.algorithms.Join` calls on ranks that have run out of inputs.

    Torch's context counts the ranks with inputs once for each forward, and calls `main_hook` once for each forward of
    these ranks.
    """

    def __init__(self, model: Any, joining: Joining) -> None:
        self._model, self._joining = model, joining

    def main_hook(self) -> None:
        """Follow the other ranks through one forward and its backward."""
        while self._model._stand_in_once(self._joining) is StepKind.refresh:
            pass

    def post_hook(self, is_last_joiner: bool) -> None:
        """Receive the model of the last ranks, when all ranks have run out."""
        try:
            self._model._sync_last(self._joining)
        finally:
            # torch's context leaves its configuration behind.
            vars(self._model).pop("_join_config", None)
            self._model._stop_joining(self._joining)


def notify(model: Any) -> Joining | None:
    """Tell torch's context that a forward begins; return what it does, or None outside such a context."""
    config = vars(model).get("_join_config")
    if config is None or not config.enable:
        return None
    from torch.distributed.algorithms.join import Join

    work: Any = Join.notify_join_context(model)
    if work is not None:
        work.wait()
    joining: Joining | None = model._torch_joining
    model._reducer.joining = joining
    return joining


def counted_group(torch_group: Any, alternative: str = "") -> Any:
    """Return the process group of torch whose ranks torch's context counts.

    Args:
        torch_group: The group of torch.distributed that a model or an optimizer was given; None without one.
        alternative: The advice in the error before that to pass such a group.

    Raises:
        UsageError: There is no such group.
    """
    if torch_group is None:
        raise UsageError(
            f"torch's Join needs a process group of torch.distributed: {alternative}call "
            'torch.distributed.init_process_group("asyncdist") and pass its group as process_group'
        )
    return torch_group
