"""The extension of Griffe that gives the reference the names under which programs use the functions.

Griffe reads sources. `asyncdist` finds its names when they are first used, and the collectives of `asyncdist.sync` are
bound methods, so their sources do not show what the names are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

import asyncdist

API = "asyncdist.groups.collectives_api.CollectivesApi"

_REFERENCE = "Arguments, errors and an example: [`asyncdist.{name}`][asyncdist.{name}]."
NAME = re.compile(r"(?<![`\[])`(?:asyncdist\.)?(sync\.)?(\w+)`(?!`)")


class PublicNames(griffe.Extension):
    """Adds the names of `asyncdist`, and the blocking collectives and stores; links public names in docstrings."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        if pkg.path != "asyncdist":
            return
        for name, (module, path) in asyncdist._NAMES.items():
            target = f"{API}.{path.removeprefix('api.')}" if path.startswith("api.") else f"{module}.{path}"
            pkg.set_member(name, griffe.Alias(name, target))
        awaited, blocking = pkg[API.removeprefix("asyncdist.")], pkg["groups.blocking_api.BlockingApi"]
        for name, function in awaited.functions.items():
            if not name.startswith("_"):
                results = blocking.overloads.get(name) or [blocking.members.get(name, function)]
                pkg["sync"].set_member(name, _blocking(function, results))
        store, awaited = pkg["store.base.Store"], pkg["store.base.AsyncStoreBase"]
        for name, attribute in list(store.attributes.items()):
            if str(attribute.value).startswith("blocking("):
                store.set_member(name, _without_future(awaited[name]))
        entry = pkg["sync.init_process_group"]
        entry.docstring.value += f"\n\n{_REFERENCE.format(name=entry.name)}"
        for each in _objects(pkg):
            if each.docstring is not None:
                # Two colons before code are reStructuredText's.
                each.docstring.value = NAME.sub(_link, each.docstring.value.replace("::\n", ":\n"))


def _blocking(function: griffe.Function, results: list[griffe.Function]) -> griffe.Function:
    """Return a collective of the blocking API, which refers to the awaited one for the arguments."""
    signatures = [
        griffe.Function(function.name, parameters=griffe.Parameters(*list(one.parameters)[1:]), returns=one.returns)
        for one in results
    ]
    blocking = signatures[0] if len(signatures) == 1 else griffe.Function(function.name)
    blocking.overloads = signatures if len(signatures) > 1 else None
    assert function.docstring is not None
    summary = function.docstring.value.partition("\n")[0]
    blocking.docstring = griffe.Docstring(f"{summary}\n\n{_REFERENCE.format(name=function.name)}", parent=blocking)
    return blocking


def _without_future(function: griffe.Function) -> griffe.Function:
    """Return a method of a blocking store, which returns the result of the awaited one."""
    assert isinstance(function.returns, griffe.ExprSubscript)
    blocking = griffe.Function(function.name, parameters=function.parameters, returns=function.returns.slice)
    blocking.docstring = function.docstring
    return blocking


def _objects(container: griffe.Object) -> Iterator[griffe.Object]:
    """Yield an object and all that it contains, without the names that stand for objects elsewhere."""
    yield container
    for member in container.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _link(name: re.Match[str]) -> str:
    """Return a link to a public name, and other code as it is."""
    if name[2] not in asyncdist.__all__:
        return name[0]
    return f"[{name[0]}][asyncdist.{name[1] or ''}{name[2]}]"
