"""Finds transports: the classes announced under the entry-point group ``asyncdist.transports``.

Device back ends are announced under ``asyncdist.device_backends``. The built-in ones are announced like those of third
parties. For a checkout that is on PYTHONPATH but not installed, the registry reads the entry points from the checkout's
pyproject.toml.
"""

from __future__ import annotations

import logging
import tomllib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncdist.config import Config
from asyncdist.errors import TransportUnavailableError, UsageError
from asyncdist.transport.base import Transport

if TYPE_CHECKING:
    from asyncdist.transport.device_collectives import DeviceCollectives

log = logging.getLogger("asyncdist")

TRANSPORTS = "asyncdist.transports"
DEVICE_BACKENDS = "asyncdist.device_backends"
_WHAT = {TRANSPORTS: "transport", DEVICE_BACKENDS: "device back end"}
_LAST = "staged"  # the device back end that all ranks can use

_CHECKOUT = Path(__file__).resolve().parents[2]

# Back ends of torch.distributed, by which old scripts ask for "whatever suits the device".
_AUTO = frozenset(("auto", "gloo", "mpi", "nccl", "ucc", "xccl", "undefined", "asyncdist"))


@cache
def _announced(group: str) -> dict[str, EntryPoint]:
    announced = {point.name: point for point in entry_points(group=group)}
    return {**_in_checkout(group), **announced}


def _in_checkout(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of the checkout's pyproject.toml; empty if the package is not in a checkout."""
    try:
        project = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return {}
    ours = project.get("entry-points", {}).get(group, {}) if project.get("name") == "asyncdist" else {}
    return {name: EntryPoint(name, value, group) for name, value in ours.items()}


def names(group: str = TRANSPORTS) -> list[str]:
    """Return the names of all that is announced under a group."""
    return sorted(_announced(group))


def is_known(name: str) -> bool:
    """Return whether a ``backend`` argument may be this."""
    try:
        return all(each in _announced(TRANSPORTS) for each in _named(name))
    except UsageError:
        return False


@cache
def load_class(name: str, group: str = TRANSPORTS) -> type[Any]:
    """Return a class that is announced; TransportUnavailableError if there is none of that name or it cannot load."""
    what, point = _WHAT[group], _announced(group).get(name)
    if point is None:
        raise TransportUnavailableError(f"there is no {what} {name!r}; there are {', '.join(names(group)) or 'none'}")
    try:
        loaded: type[Any] = point.load()
    except ImportError as cause:
        raise TransportUnavailableError(f"the {what} {name!r} cannot be loaded: {cause}") from cause
    return loaded


def selected(backend: str | None) -> list[type[Transport]]:
    """Return the transports that a ``backend`` argument stands for, the preferred first.

    ``None``, ``"auto"`` and torch's back-end names (also by device, ``"cpu:gloo,cuda:nccl"``) take every transport that
    can be used here; other names, ``"tcp"`` or ``"shm,tcp"``, take those. TransportUnavailableError says why one cannot be
    used.
    """
    named = _named(backend)
    usable: list[type[Transport]] = []
    for kind in map(load_class, dict.fromkeys(named or names())):
        reason = kind.probe()
        if reason is None:
            usable.append(kind)
        elif named:
            raise TransportUnavailableError(f"the transport {kind.name!r} cannot be used here: {reason}")
        else:
            log.info("the transport %s cannot be used here: %s", kind.name, reason)
    if not usable:
        raise TransportUnavailableError("no transport can be used here; `asyncdist info` says why for each")
    return sorted(usable, key=lambda kind: -kind.preference)


def set_by(config: Config) -> list[type[Transport]]:
    """Return the transports that ASYNCDIST_TRANSPORT stands for, as `selected` does."""
    try:
        return selected(config.transport)
    except (UsageError, TransportUnavailableError) as error:
        raise type(error)(f"ASYNCDIST_TRANSPORT={config.transport!r}: {error}") from error


def device_backends(backend: str | None, device: str) -> list[type[DeviceCollectives]]:
    """Return the back ends for a device type that a ``backend`` argument stands for, the preferred first.

    The last one copies through the host. Back ends that cannot be loaded here are left out. ``"cuda:NAME"`` stands for that
    one and the last; if it cannot be used, TransportUnavailableError says why.
    """
    name = _by_device(backend).get(device, "auto")
    announced = names(DEVICE_BACKENDS)
    if name in announced:  # also torch's name of its back end: "cuda:nccl" means this one
        return [load_class(one, DEVICE_BACKENDS) for one in dict.fromkeys((name, _LAST))]
    if name not in _AUTO:
        known = ", ".join(announced)
        raise TransportUnavailableError(f"there is no back end {name!r} for {device} tensors; there are {known}")
    loaded: list[type[DeviceCollectives]] = []
    for one in announced:
        try:
            loaded.append(load_class(one, DEVICE_BACKENDS))
        except TransportUnavailableError as cause:
            log.info("%s", cause)
    return sorted(loaded, key=lambda kind: -kind.preference)


def _named(backend: str | None) -> list[str]:
    """Return the transports that a ``backend`` argument names; none where it leaves the choice to us."""
    wanted = _for_cpu(backend)
    return [] if wanted in _AUTO else [name.strip() for name in wanted.split(",")]


def _for_cpu(backend: str | None) -> str:
    """Return the back end for CPU tensors in torch's ``"device:name,device:name"`` notation."""
    text = (backend or "auto").strip().lower()
    return _by_device(text).get("cpu", "auto") if ":" in text else text


def _by_device(backend: str | None) -> dict[str, str]:
    """Return the back ends by device; for all of them if the argument names no device."""
    text = (backend or "auto").strip().lower()
    if ":" not in text:
        return {}
    by_device: dict[str, str] = {}
    for pair in text.split(","):
        device, colon, name = pair.partition(":")
        if not colon or not device.strip() or not name.strip():
            raise UsageError(f'backend={backend!r} is not of the form "cpu:tcp,cuda:nccl"')
        by_device[device.strip()] = name.strip()
    return by_device
