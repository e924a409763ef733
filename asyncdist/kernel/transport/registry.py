"""Finds transports and device back ends by the entry points of installed packages.

Transports are registered under the entry-point group ``asyncdist.transports``, device back ends under
``asyncdist.device_backends``, the built-in ones like those of third parties. For a checkout that is on PYTHONPATH but not
installed, the entry points of the built-in ones come from the checkout's pyproject.toml.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, EntryPoint, PathDistribution, distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncdist.config import Config
from asyncdist.errors import TransportUnavailableError, UsageError
from asyncdist.kernel.transport.base import Transport

if TYPE_CHECKING:
    from asyncdist.kernel.transport.device_collectives import DeviceCollectives

log = logging.getLogger("asyncdist")

TRANSPORTS = "asyncdist.transports"
DEVICE_BACKENDS = "asyncdist.device_backends"
_KINDS = {TRANSPORTS: "transport", DEVICE_BACKENDS: "device back end"}
_HINTS = {TRANSPORTS: "; leave the name out, or give 'auto' or a back end of torch, to use those that work"}
_STAGED = "staged"
"""The device back end that all ranks can use."""

_BUILT_IN = "asyncdist_transports."
_CHECKOUT = Path(__file__).resolve().parents[3]

# Scripts written for torch.distributed pass its back-end names; each of them selects automatically.
_AUTO = frozenset(("auto", "gloo", "mpi", "nccl", "ucc", "xccl", "undefined", "asyncdist"))


@cache
def _registered(group: str) -> dict[str, EntryPoint]:
    installed: dict[str, EntryPoint] = {}
    for package in _packages_with(group):
        for point in package.entry_points.select(group=group):
            installed.setdefault(point.name, point)
    if any(point.value.startswith(_BUILT_IN) for point in installed.values()):
        return installed
    return {**_in_checkout(group), **installed}


def _packages_with(group: str) -> Iterator[Distribution]:
    """Return the installed packages whose entry points name a group.

    `importlib.metadata` opens and parses the files of all packages in four times the time, a sixth of the start of a rank.
    """
    for folder in sys.path:
        try:
            names = os.listdir(folder := folder or ".")
        except NotADirectoryError:  # an archive
            yield from distributions(path=[folder])
            continue
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                with contextlib.suppress(OSError), open(f"{folder}/{name}/entry_points.txt", "rb", 0) as file:
                    if group.encode() in file.read():
                        yield PathDistribution(Path(folder, name))


def _in_checkout(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of the checkout's pyproject.toml; empty if the package is not in a checkout."""
    try:
        project = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return {}
    points = project.get("entry-points", {}).get(group, {}) if project.get("name") == "asyncdist" else {}
    return {name: EntryPoint(name, value, group) for name, value in points.items()}


def names(group: str = TRANSPORTS) -> list[str]:
    """Return the names of all classes that are registered under a group."""
    return sorted(_registered(group))


def is_known(backend: str) -> bool:
    """Return whether a ``backend`` argument names only registered transports and torch's back ends."""
    try:
        return all(name in _registered(TRANSPORTS) for name in _transport_names(backend))
    except UsageError:
        return False


@cache
def load_class(name: str, group: str = TRANSPORTS) -> type[Any]:
    """Return a registered class. Raises TransportUnavailableError if the name is not registered or cannot be loaded."""
    kind, point = _KINDS[group], _registered(group).get(name)
    if point is None:
        known = ", ".join(names(group)) or "none"
        raise TransportUnavailableError(f"there is no {kind} {name!r}; there are {known}{_HINTS.get(group, '')}")
    try:
        loaded: type[Any] = point.load()
    except ImportError as cause:
        raise TransportUnavailableError(f"the {kind} {name!r} cannot be loaded: {cause}") from cause
    return loaded


def selected(backend: str | None) -> list[type[Transport]]:
    """Return the transports that a ``backend`` argument selects, the preferred first.

    ``None``, ``"auto"`` and torch's back-end names (also by device, ``"cpu:gloo,cuda:nccl"``) select every usable
    transport; other names, ``"tcp"`` or ``"shm,tcp"``, select these transports.

    Raises:
        TransportUnavailableError: A named transport cannot be used, or none can; the message has the reason.
        UsageError: The argument is malformed.
    """
    named = _transport_names(backend)
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
        raise TransportUnavailableError("no transport can be used here; `asyncdist info` shows the reason for each")
    return sorted(usable, key=lambda kind: -kind.preference)


def requested(backend: str | None, config: Config) -> str | None:
    """Return a ``backend`` argument; None for torch's name of a back end if ASYNCDIST_TRANSPORT selects the transports."""
    is_of_torch = backend is not None and backend.strip().lower() in _AUTO - {"auto"}
    return None if is_of_torch and config.transport != "auto" else backend


def set_by(config: Config) -> list[type[Transport]]:
    """Return the transports that ASYNCDIST_TRANSPORT selects, as `selected` does."""
    try:
        return selected(config.transport)
    except (UsageError, TransportUnavailableError) as error:
        raise type(error)(f"ASYNCDIST_TRANSPORT={config.transport!r}: {error}") from error


def device_backends(backend: str | None, device: str) -> list[type[DeviceCollectives]]:
    """Return the back ends for a device type that a ``backend`` argument selects, the preferred first.

    The last one copies through the host. Back ends that cannot be loaded are left out. ``"cuda:NAME"`` selects that one and
    the last one.

    Raises:
        TransportUnavailableError: A named back end cannot be used; the message has the reason.
    """
    name = _by_device(backend).get(device, "auto")
    registered = names(DEVICE_BACKENDS)
    if name in registered:  # before `_AUTO`: "cuda:nccl" selects this package's back end
        return [load_class(one, DEVICE_BACKENDS) for one in dict.fromkeys((name, _STAGED))]
    if name not in _AUTO:
        known = ", ".join(registered)
        raise TransportUnavailableError(f"there is no back end {name!r} for {device} tensors; there are {known}")
    loaded: list[type[DeviceCollectives]] = []
    for one in registered:
        try:
            loaded.append(load_class(one, DEVICE_BACKENDS))
        except TransportUnavailableError as cause:
            log.info("%s", cause.summary)
    return sorted(loaded, key=lambda kind: -kind.preference)


def _transport_names(backend: str | None) -> list[str]:
    """Return the transports that a ``backend`` argument names; none for automatic selection."""
    wanted = _by_device(backend).get("cpu", "auto")
    return [] if wanted in _AUTO else [name.strip() for name in wanted.split(",")]


def _by_device(backend: str | None) -> dict[str, str]:
    """Return the back ends by device type, from torch's ``"device:name,device:name"`` notation or a name for the CPU."""
    if backend is not None and not isinstance(backend, str):
        raise UsageError(f"backend is a text such as 'shm,tcp' or 'auto', not {backend!r}")
    text = (backend or "auto").strip().lower()
    if ":" not in text:
        return {"cpu": text}
    by_device: dict[str, str] = {}
    for pair in text.split(","):
        device, colon, name = pair.partition(":")
        if not colon or not device.strip() or not name.strip():
            raise UsageError(f'backend={backend!r} is not of the form "cpu:tcp,cuda:nccl"')
        by_device[device.strip()] = name.strip()
    return by_device
