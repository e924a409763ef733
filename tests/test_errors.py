"""Tests of the messages of all errors, and of the page that explains them."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch._utils import ExceptionWrapper

from asyncdist import errors
from asyncdist.base import release
from asyncdist.base.error_text import describe_error
from asyncdist.cli import main
from asyncdist.elastic import errors as elastic_errors
from asyncdist.errors import AddressError, AsyncdistError, GroupAbortedError, UsageError
from asyncdist.groups.group import Group
from asyncdist.kernel.engine.operation import local_failure
from asyncdist.rpc import errors as rpc_errors
from asyncdist.store.persistence.log_format import DamagedError
from asyncdist.testing.cluster import world_of
from asyncdist.weights import errors as weights_errors

PAGE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "PeerLostError": (1, "connection closed"),
    "MismatchError": (1, "rank 0 called barrier"),
    "RendezvousTimeoutError": ([0], [1], 60.0, "tcp://host:1"),
    "JobTimeoutError": ("job", 1, 0, 2, 0, 60.0),
    "StoreTimeoutError": ("get", ["key"], 3.0),
    "UnevenInputsError": ([0], [1]),
    "DigestError": ("layer.weight", "publisher (process 7 on node1)", "version 3"),
    "PublisherReplacedError": (1, 2),
    **dict.fromkeys(
        ("CallError", "CallRefusedError", "OverloadedError", "ResultError"), ("policy", "act", "process 7", "it broke")
    ),
    "CallTimeoutError": ("policy", "act", "process 7", 0.5),
    "CalleeLostError": ("policy", "act", "process 7", "its process has ended", True),
    "NameNotFoundError": ("policy", "asyncdist://host:1/job", 3.0, "no process has published it"),
    "PartialError": ("policy", "act", [1, None], {1: ValueError("it broke")}),
    "RemoteError": ("policy", "act", "process 7", "ValueError", "it broke", "Traceback (most recent call last): …"),
}
KINDS = [
    kind
    for module in (errors, elastic_errors, rpc_errors, weights_errors)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, AsyncdistError) and kind.__module__ == module.__name__
]
every_error = pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])


def make(kind: type[AsyncdistError]) -> AsyncdistError:
    return kind(*ARGUMENTS.get(kind.__name__, ("it broke",)))


def reference(kind: type[AsyncdistError]) -> str:
    return f"see `asyncdist explain {kind.__name__}`"


@every_error
def test_message_ends_with_the_command_that_explains_it(kind: type[AsyncdistError]) -> None:
    error = make(kind)
    *text, last = str(error).splitlines()
    assert last == reference(kind)
    assert "\n".join(text) == error.summary
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    program, command, *arguments = last.removeprefix("see ").strip("`").split()
    assert program == "asyncdist"
    explained = CliRunner().invoke(main, [command, *arguments])
    assert explained.exit_code == 0, explained.output
    assert explained.output.startswith(f"## {kind.__name__}\n")
    assert "What happened:" in explained.output
    assert "](" not in explained.output


def test_similar_names_are_proposed_for_an_unknown_error() -> None:
    run = CliRunner().invoke(main, ["explain", "PeerLost"])
    assert (run.exit_code, "do you mean PeerLostError" in run.output) == (2, True)
    assert CliRunner().invoke(main, ["explain"]).output.split() == re.findall(
        "^### (.*)$", PAGE.read_text(), re.MULTILINE
    )


def test_message_has_the_address_too_once_the_documentation_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "PUBLISHED", "https://docs.example/0.2/")
    inner = AddressError("the port is in use")
    last = "see `asyncdist explain AddressError`, or https://docs.example/0.2/errors/#addresserror"
    assert str(inner) == f"the port is in use\n{last}"
    assert UsageError(f"it failed ({inner}), and more").summary == "it failed (the port is in use), and more"


@every_error
def test_worker_of_a_data_loader_passes_the_text_on(kind: type[AsyncdistError]) -> None:
    """The loader raises an error of the worker's class, or a RuntimeError, with the traceback of the worker."""
    text = make(kind).summary
    try:
        raise make(kind)
    except AsyncdistError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(RuntimeError, match="in DataLoader worker process 0") as raised:
        wrapped.reraise()
    assert text in str(raised.value)
    assert "test_worker_of_a_data_loader" in str(raised.value)


@every_error
def test_page_has_a_section_with_advice_for_each_error(kind: type[AsyncdistError]) -> None:
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"\n### {kind.__name__}\n")
    section = re.split(r"^##", section, maxsplit=1, flags=re.MULTILINE)[0]
    assert re.findall(r"^- \*\*(.*?):\*\* \S", section, re.MULTILINE) == ["What happened", "What to do"]
    # The page names the other classes of which the error is an instance, as far as Python defines them.
    theirs = {base.__name__ for base in kind.__bases__ if base.__module__ == "builtins"}
    assert theirs <= set(re.findall(r"`(\w+)`", section)), f"{kind.__name__} is also one of {theirs}"


def test_page_has_no_section_of_an_unknown_error() -> None:
    headings = re.findall(r"^### (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(kind.__name__ for kind in KINDS)


def test_error_of_an_internal_class_refers_to_its_documented_base() -> None:
    assert str(DamagedError(7, "bad checksum")).endswith(f"\n{reference(errors.ProtocolError)}")


def test_nested_messages_repeat_no_reference() -> None:
    inner = AddressError("the port is in use")
    outer = UsageError(f"the store failed ({inner}); then: {UsageError(f'{inner}, and more')}")
    assert outer.summary == "the store failed (the port is in use); then: the port is in use, and more"
    assert str(outer).count("asyncdist explain") == 1
    assert describe_error(inner) == "the port is in use"


async def test_message_that_peers_relay_has_one_reference() -> None:
    async with world_of(2) as groups:

        async def aborted(group: Group) -> GroupAbortedError:
            with pytest.raises(GroupAbortedError) as caught:
                await group.barrier()
            return caught.value

        waiting = groups[0].barrier()
        cause = local_failure(AddressError("the port is in use"), 1)
        groups[1].abort(str(cause))
        with pytest.raises(GroupAbortedError, match="the port is in use") as caught:
            await waiting
        for error in (caught.value, await aborted(groups[0]), await aborted(groups[1])):
            assert str(error).count("asyncdist explain") == 1
            assert str(error).endswith(reference(GroupAbortedError))
