"""A communication runtime for distributed PyTorch training whose collectives you can await.

    import asyncdist as dist

    await dist.init_process_group()
    await dist.all_reduce(tensor)
    await dist.destroy_process_group()

Every collective has torch.distributed's name and arguments, starts at once and returns a `Work`. For blocking programs
there is `asyncdist.sync`. Names are loaded when first used: ``import asyncdist`` alone does not import torch.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
# Where each public name lives: (module, attribute).
_NAMES = {
    **{name: (module, name) for module, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, re.MULTILINE)},
    **{name: ("asyncdist.groups.aio", path) for name, path in re.findall(r"^(\w+) = (api\.\w+)$", _STUB, re.MULTILINE)},
    "ProcessGroup": ("asyncdist.groups.group", "Group"),  # torch's name, for annotations
    "__version__": ("asyncdist.base.release", "VERSION"),
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'asyncdist' has no attribute {name!r}")
    module, path = _NAMES[name]
    value: Any = importlib.import_module(module)
    for attribute in path.split("."):
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
