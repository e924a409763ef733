"""The help texts of `asyncdist.sync`, made from those of the awaited API."""

from __future__ import annotations

import re
from types import FunctionType
from typing import TypeVar

from asyncdist.groups.collectives_api import CollectivesApi

Api = TypeVar("Api", bound=CollectivesApi)


def without_await(text: str) -> str:
    """Return a docstring whose examples call the blocking API."""
    return re.sub(r"\bawait (?=[\w.]+\()", "", re.sub(r"\bawait work\b.*", "work.wait()", text))


def with_blocking_help(api: type[Api]) -> type[Api]:
    """Give the collectives of a blocking API the results and examples that `help` shows. Their code is shared."""
    for name, awaited in vars(CollectivesApi).items():
        if isinstance(awaited, FunctionType) and not name.startswith("_"):
            code, result = awaited.__code__, awaited.__annotations__["return"]
            if "async_op" in code.co_varnames:
                result += " | None"
            elif "_finish" in code.co_names:
                result = "None"
            elif "_value" in code.co_names:
                result = result.removeprefix("Work[").removesuffix("]")
            call = FunctionType(code, awaited.__globals__, name, awaited.__defaults__, awaited.__closure__)
            call.__kwdefaults__, call.__qualname__ = awaited.__kwdefaults__, awaited.__qualname__
            call.__annotations__ = {**awaited.__annotations__, "return": result}
            call.__doc__ = without_await(awaited.__doc__ or "")
            call.__dict__.update(awaited.__dict__)
            setattr(api, name, call)
    return api
