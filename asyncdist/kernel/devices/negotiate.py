"""Agreement of all ranks of a group on one device backend.

First, all ranks exchange the capabilities of every backend on the host, and each rank removes the backends that the ranks
cannot use together. Then the ranks start the best remaining backend, and exchange whether it has started everywhere. If it
has not, they try the next one. `DeviceGroup` calls `negotiate_backend` in its first collective.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from asyncdist.base.error_text import describe_error
from asyncdist.errors import TransportUnavailableError
from asyncdist.kernel.transport.device_collectives import DeviceCollectives, DeviceContext

log = logging.getLogger("asyncdist")

Offer = tuple[DeviceCollectives | None, Mapping[str, Any], str]
"""A backend if this rank could create it, its capabilities, and the reason why it cannot be used; empty if it can."""


def negotiate_backend(
    context: DeviceContext, backend_classes: Sequence[type[DeviceCollectives]], *, device: str
) -> DeviceCollectives:
    """Return the first backend that all ranks can start. Collective; blocks. Backends that are not chosen are closed.

    Args:
        context: The group's context; its deadline applies.
        backend_classes: The candidates, in order of preference; the same on every rank.
        device: Name of the device for messages.

    Raises:
        TransportUnavailableError: No candidate works; the text gives the reason for each.
    """
    offers = {cls.name: _offer(cls, context) for cls in backend_classes}
    chosen: DeviceCollectives | None = None
    try:
        chosen, reasons = _chosen(offers, context)
    finally:
        for backend, _, _ in offers.values():
            if backend is not None and backend is not chosen:
                backend.close()
    refused = "; ".join(f"not {name}: {reason}" for name, reason in reasons.items())
    if chosen is None:
        raise TransportUnavailableError(f"no backend connects the ranks' {device} tensors: {refused}")
    suffix = f" ({refused})" if refused else ""
    log.info("group %r carries %s tensors by %s%s", context.host.name, device, chosen.name, suffix)
    return chosen


def _chosen(offers: Mapping[str, Offer], context: DeviceContext) -> tuple[DeviceCollectives | None, dict[str, str]]:
    """Return the chosen backend, and the reasons against those before it."""
    gathered = context.all_gather_object(
        {name: reason or dict(capabilities) for name, (_, capabilities, reason) in offers.items()}
    )
    reasons: dict[str, str] = {}
    for name, (backend, _, _) in offers.items():
        reason = _first_refusal(name, gathered)
        if reason is None:
            assert backend is not None, "this rank published its capabilities"
            reason = backend.refusal([one[name] for one in gathered]) or _start_failure(backend, context, gathered)
        if reason is None:
            return backend, reasons
        reasons[name] = reason
    return None, reasons


def _offer(cls: type[DeviceCollectives], context: DeviceContext) -> Offer:
    """Create a backend; return it with its capabilities, or with the reason why this rank cannot use it."""
    reason = cls.probe()
    if reason is not None:
        return None, {}, reason
    backend: DeviceCollectives | None = None
    try:
        backend = cls(context)
        return backend, backend.capabilities(), ""
    # Drivers and libraries raise errors of any type.
    except Exception as cause:
        return backend, {}, f"{type(cause).__name__}: {cause}"


def _first_refusal(name: str, gathered: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why some rank cannot use the backend, or None."""
    offers = [one.get(name, "it does not have this backend") for one in gathered]
    return _of_lowest_rank([offer if isinstance(offer, str) else None for offer in offers])


def _of_lowest_rank(reasons: Sequence[str | None]) -> str | None:
    """Return the reason of the lowest rank that has one."""
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None), None)


def _start_failure(
    backend: DeviceCollectives, context: DeviceContext, gathered: Sequence[Mapping[str, Any]]
) -> str | None:
    """Start the backend on this rank; return why it could not be started on some rank, or None."""
    try:
        backend.start([one[backend.name] for one in gathered])
        reason = None
    except Exception as cause:
        reason = describe_error(cause)
    return _of_lowest_rank(context.all_gather_object(reason))
