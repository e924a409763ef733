"""Which way a group takes between its devices: every rank says what it can do, and all come to the same answer.

Two meetings on the host: cards, by which each way that cannot be gone is struck out, the same on every rank; then, for the
best that is left, whether it could really be opened everywhere. What fails only now is struck out too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from asyncdist.devices.ensemble import Ensemble, Site
from asyncdist.errors import TransportUnavailableError

log = logging.getLogger("asyncdist")


def settle(site: Site, kinds: Sequence[type[Ensemble]], *, device: str) -> Ensemble:
    """Return the first of some ways, the preferred first, that all ranks can go; collective, and blocks.

    TransportUnavailableError says why there is none. Those that are not taken are closed.
    """
    offers = {kind.name: _offer(kind, site) for kind in kinds}
    told = site.tell({name: dict(card) if ensemble else reason for name, (ensemble, card, reason) in offers.items()})
    taken: Ensemble | None = None
    reasons: dict[str, str] = {}
    for kind in kinds:
        ensemble, _, _ = offers[kind.name]
        reason = _first_refusal(kind.name, told)
        if reason is None and ensemble is not None and taken is None:
            reason = ensemble.refusal([one[kind.name] for one in told]) or _opened(ensemble, site, told)
            if reason is None:
                taken = ensemble
        if ensemble is not None and ensemble is not taken:
            ensemble.close()
        if reason is not None:
            reasons[kind.name] = reason
    words = "; ".join(f"not {name}: {reason}" for name, reason in reasons.items())
    if taken is None:
        raise TransportUnavailableError(f"no way between the ranks' {device} tensors: {words}")
    log.info("group %r carries %s tensors by %s%s", site.host.name, device, taken.name, f" ({words})" if words else "")
    return taken


def _offer(kind: type[Ensemble], site: Site) -> tuple[Ensemble | None, Mapping[str, Any], str]:
    reason = kind.probe()
    if reason is not None:
        return None, {}, reason
    try:
        ensemble = kind(site)
        return ensemble, ensemble.card(), ""
    except Exception as cause:  # whatever a driver or a library says: it is the reason why not
        return None, {}, f"{type(cause).__name__}: {cause}"


def _first_refusal(name: str, told: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why some rank cannot go this way at all, the lowest rank's reason."""
    for rank, one in enumerate(told):
        offer = one.get(name, "it does not know this way")
        if isinstance(offer, str):
            return f"rank {rank}: {offer}"
    return None


def _opened(ensemble: Ensemble, site: Site, told: Sequence[Mapping[str, Any]]) -> str | None:
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
