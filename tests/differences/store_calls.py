"""Programs of store calls: the clients that run them, and a dictionary that says what they must give."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from asyncdist import store
from asyncdist.errors import AsyncdistError
from tests.differences.programs import KEYS, StoreCall, StoreProgram, spelled
from tests.differences.reference import RIGHT, Verdict

_SHORT, _LIMIT = timedelta(milliseconds=2), timedelta(seconds=10)
"""The limits of calls that wait for a key, and of others."""
_FAILED = "failed"


def clients() -> dict[str, Callable[[], Any]]:
    """Return what makes an empty store of each kind. FileStore of torch is left out: each wait takes it a second."""
    return {
        "asyncdist TCPStore": lambda: store.TCPStore("127.0.0.1", 0, is_master=True, timeout=_LIMIT),
        "asyncdist HashStore": store.HashStore,
        "torch TCPStore": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=_LIMIT, wait_for_workers=False),
        "torch HashStore": dist.HashStore,
    }


def run(program: StoreProgram, client: Any) -> list[Any]:
    """Return the answer of each call; a call that raises has `_FAILED` and the error as its answer."""
    prefixed = (store if type(client).__module__.startswith("asyncdist") else dist).PrefixStore("p", client)
    answers = []
    client.set_timeout(_LIMIT)
    num_before = client.num_keys()
    for call in program.calls:
        try:
            called = prefixed if call.prefix else client
            called.set_timeout(_SHORT if call.name in ("get", "multi_get") else _LIMIT)
            answer = _answer(called, call)
            answers.append(answer - num_before if call.name == "num_keys" else _plain(answer))
        except Exception as error:
            is_named = isinstance(error, AsyncdistError | TypeError | ValueError | dist.DistError)
            answers.append((_FAILED, type(error).__name__, str(error).split("\n")[0][:200], is_named))
    return answers


def empty(client: Any) -> None:
    """Delete what a program may have left in a store."""
    prefixed = (store if type(client).__module__.startswith("asyncdist") else dist).PrefixStore("p", client)
    for each in (client, prefixed):
        each.set_timeout(_LIMIT)
        for key in map(spelled, KEYS):
            each.delete_key(key)
            for _ in range(each.queue_len(key)):
                each.queue_pop(key, block=False)


def _answer(client: Any, call: StoreCall) -> Any:
    [first, *others] = call.arguments or (None,)
    if call.name == "num_keys":
        return client.num_keys()
    if call.name == "multi_set":
        return client.multi_set([spelled(key) for key, _ in first], [spelled(value) for _, value in first])
    if call.name in ("check", "multi_get"):
        keys = [spelled(key) for key in first]
        if call.name == "check":
            return client.check(keys)
        return client.multi_get(keys)
    key, rest = spelled(first), [spelled(each) if isinstance(each, str) else each for each in others]
    return client.queue_pop(key, block=False) if call.name == "queue_pop" else getattr(client, call.name)(key, *rest)


def _plain(answer: Any) -> Any:
    if isinstance(answer, list):
        return [bytes(each) for each in answer]
    return answer.encode() if isinstance(answer, str) else answer


class Model:
    """The keys and queues of a store in dictionaries."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.queues: dict[str, list[bytes]] = {}

    def answer(self, call: StoreCall) -> Any:
        """Return the answer of a call, `_FAILED` if it must fail."""
        name = call.name
        [first, *others] = call.arguments or (None,)
        full = (lambda key: f"{call.prefix}/{key}") if call.prefix else (lambda key: key)
        if name == "num_keys":
            return len(self.keys)
        if name == "multi_set":
            self.keys.update({full(key): spelled(value).encode() for key, value in first})
            return None
        if name in ("check", "multi_get"):
            keys = [full(key) for key in first]
            has_all = all(key in self.keys or (name == "check" and self.queues.get(key)) for key in keys)
            if name == "check":
                return has_all
            return [self.keys[key] for key in keys] if has_all else _FAILED
        return getattr(self, f"_{name}")(full(first), *others)

    def _set(self, key: str, value: str) -> None:
        self.keys[key] = spelled(value).encode()

    def _get(self, key: str) -> Any:
        return self.keys.get(key, _FAILED)

    def _add(self, key: str, amount: int) -> Any:
        try:
            total = int(self.keys.get(key, b"0")) + amount
        except ValueError:
            return _FAILED
        self.keys[key] = str(total).encode()
        return total

    def _compare_set(self, key: str, expected: str, desired: str) -> bytes:
        held = self.keys.get(key)
        if held == spelled(expected).encode() or (held is None and not expected):
            self.keys[key] = spelled(desired).encode()
            return self.keys[key]
        return spelled(expected).encode() if held is None else held

    def _delete_key(self, key: str) -> bool:
        return self.keys.pop(key, None) is not None

    def _append(self, key: str, value: str) -> None:
        self.keys[key] = self.keys.get(key, b"") + spelled(value).encode()

    def _queue_push(self, key: str, value: str) -> None:
        self.queues.setdefault(key, []).append(spelled(value).encode())

    def _queue_pop(self, key: str) -> Any:
        return self.queues[key].pop(0) if self.queues.get(key) else _FAILED

    def _queue_len(self, key: str) -> int:
        return len(self.queues.get(key, ()))


def judge(program: StoreProgram, answers: list[Any]) -> Verdict:
    """Return how a store did. What follows a wrong or refused answer is not looked at: the store holds something else."""
    model = Model()
    for number, (call, answer) in enumerate(zip(program.calls, answers, strict=True)):
        due = model.answer(call)
        has_failed = isinstance(answer, tuple) and answer[0] == _FAILED
        where = f"call {number}, {call.name}{call.arguments!r:.200}: "
        if has_failed and due == _FAILED:
            if not answer[-1]:
                return Verdict("unnamed", f"{where}{answer[1]}: {answer[2]}")
        elif has_failed:
            return Verdict("refused" if answer[-1] else "unnamed", f"{where}{answer[1]}: {answer[2]}")
        elif due != answer:
            return Verdict("wrong", f"{where}{answer!r:.100} for {due!r:.100}")
    return RIGHT
