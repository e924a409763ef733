"""Which way a group takes between its devices: every rank says what it can do, and all come to the same answer.

Two meetings on the host: cards, by which each way that cannot be gone is struck out, the same on every rank; then, for the
best that is left, whether it could really be opened everywhere. What fails only now is struck out too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from asyncdist.errors import TransportUnavailableError
from asyncdist.transport.device_collectives import DeviceCollectives, DeviceContext

log = logging.getLogger("asyncdist")

Offer = tuple[DeviceCollectives | None, Mapping[str, Any], str]
"""A way, if it could be made here, its card, and why it cannot be gone; empty if it can."""


def negotiate_backend(
    site: DeviceContext, kinds: Sequence[type[DeviceCollectives]], *, device: str
) -> DeviceCollectives:
    """Return the first of some ways, the preferred first, that all ranks can go; collective, and blocks.

    TransportUnavailableError says why there is none. Those that are not taken are closed.
    """
    offers = {kind.name: _offer(kind, site) for kind in kinds}
    taken: DeviceCollectives | None = None
    try:
        taken, reasons = _chosen(offers, site)
    finally:
        for ensemble, _, _ in offers.values():
            if ensemble is not None and ensemble is not taken:
                ensemble.close()
    words = "; ".join(f"not {name}: {reason}" for name, reason in reasons.items())
    if taken is None:
        raise TransportUnavailableError(f"no way between the ranks' {device} tensors: {words}")
    log.info("group %r carries %s tensors by %s%s", site.host.name, device, taken.name, f" ({words})" if words else "")
    return taken


def _chosen(offers: Mapping[str, Offer], site: DeviceContext) -> tuple[DeviceCollectives | None, dict[str, str]]:
    """Meet the others; return the way that is taken, and why those before it are not."""
    told = site.tell({name: reason or dict(card) for name, (_, card, reason) in offers.items()})
    reasons: dict[str, str] = {}
    for name, (ensemble, _, _) in offers.items():
        reason = _first_refusal(name, told)
        if reason is None:
            assert ensemble is not None, "we told of a card"
            reason = ensemble.refusal([one[name] for one in told]) or _opened(ensemble, site, told)
        if reason is None:
            return ensemble, reasons
        reasons[name] = reason
    return None, reasons


def _offer(kind: type[DeviceCollectives], site: DeviceContext) -> Offer:
    """Make a way, and what the others must know of it; or say why it cannot be gone here."""
    reason = kind.probe()
    if reason is not None:
        return None, {}, reason
    ensemble: DeviceCollectives | None = None
    try:
        ensemble = kind(site)
        return ensemble, ensemble.card(), ""
    except Exception as cause:  # whatever a driver or a library says: it is the reason why not
        return ensemble, {}, f"{type(cause).__name__}: {cause}"


def _first_refusal(name: str, told: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why some rank cannot go this way at all, the lowest rank's reason."""
    for rank, one in enumerate(told):
        offer = one.get(name, "it does not know this way")
        if isinstance(offer, str):
            return f"rank {rank}: {offer}"
    return None


def _opened(ensemble: DeviceCollectives, site: DeviceContext, told: Sequence[Mapping[str, Any]]) -> str | None:
    """Open it here; return why it could not be opened somewhere."""
    try:
        ensemble.start([one[ensemble.name] for one in told])
        reason = None
    except Exception as cause:
        reason = str(cause) or type(cause).__name__
    for rank, theirs in enumerate(site.tell(reason)):
        if theirs is not None:
            return f"rank {rank}: {theirs}"
    return None
