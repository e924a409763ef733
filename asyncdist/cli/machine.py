"""Describe the machine of a measurement without importing torch. Used by the reports and `asyncdist info`."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from asyncdist.errors import UsageError

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_COPIED = 64 << 20


def machine() -> dict[str, str]:
    """Return short texts: the processor, cores, caches, the system, the load of the last minute, and the versions."""
    return {
        "processor": processor(),
        "cores": str(os.cpu_count() or "?"),
        "caches": caches(),
        "system": f"{platform.system()} {platform.release()}",
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        **{name: installed(name) for name in ("torch", "uvloop", "asyncdist")},
    }


def processor() -> str:
    """Return the processor's model name, or its architecture if the name is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return models[0] if models else platform.processor() or platform.machine()


def measured_machine() -> dict[str, str]:
    """Return `machine`, with the rate at which one core copies memory. It takes a tenth of a second."""
    source, target, fastest = bytearray(_COPIED), bytearray(_COPIED), float("inf")
    for _ in range(3):
        start = time.perf_counter()
        target[:] = source
        fastest = min(fastest, time.perf_counter() - start)
    return {**machine(), "memory": f"{_COPIED / fastest / 1e9:.1f} GB/s"}


def refuse_another_machine(earlier: Mapping[str, str]) -> None:
    """Raise UsageError, which names the differences, unless this is the machine of earlier figures."""
    here = machine()
    differences = [
        f"{key} {earlier.get(key, 'not recorded')} there and {here[key]} here"
        for key in ("processor", "cores", "caches")
        if earlier.get(key) != here[key]
    ]
    if differences:
        raise UsageError(f"figures of different machines cannot be compared: {', '.join(differences)}")


def caches() -> str:
    """Return the sizes of the caches of data of the first core, from the smallest on; "?" if they are unknown."""
    found = []
    for folder in sorted(_CACHES.glob("index*")):
        try:
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return " ".join(found) or "?"


def installed(package: str) -> str:
    """Return the version of an installed package without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
