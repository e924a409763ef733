"""Describe the machine of a measurement without importing torch. Used by the reports and `asyncdist info`."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine() -> dict[str, str]:
    """Return short texts: the processor, the cores, the system, the load of the last minute, and the versions."""
    return {
        "processor": processor(),
        "cores": str(os.cpu_count() or "?"),
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


def installed(package: str) -> str:
    """Return the version of an installed package without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
