"""The order of the callbacks of the futures of works, and the groups on which these callbacks communicate.

A callback of ``get_future().then`` may call collectives of its group, as torch's PowerSGD and quantization hooks do. Ranks
complete operations at different times, so the callbacks of one group run one at a time, in the order in which the program
has attached them, which is the same on every rank. Their collectives run on a sibling of the group: no order exists
between them and what the program's own threads call at the same time.

`patches` replaces the methods of torch's class of futures by `then` and its like here, and `collect_all`. torch's code in
C++ does not call them; its callbacks do not communicate.
"""

from __future__ import annotations

import threading
from asyncio import _get_running_loop
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

import torch

from asyncdist.base.callables import AnyFunction
from asyncdist.errors import UsageError
from asyncdist.groups import Group
from asyncdist.kernel import call_in_thread

Future = torch.futures.Future

running: dict[int, CallbackOrder] = {}
"""By thread: the order whose callback runs in it."""

_orders: WeakKeyDictionary[Any, tuple[CallbackOrder, bool]] = WeakKeyDictionary()
"""By future: the order of its callbacks, and whether the future itself is the result of a callback."""


class CallbackOrder:
    """The callbacks of the futures of one group.

    Args:
        name: A name of the group that is the same on all of its ranks, and that no other group has.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Any, Future[None]]] = deque()
        self._is_running = False
        self._within: dict[CallbackOrder, tuple[Group, CallbackOrder]] = {}

    def add(self, future: Any) -> None:
        """Run the callbacks of ``future`` in this order."""
        _orders[future] = self, False

    def attach(self, original: AnyFunction, future: Any, callback: AnyFunction) -> Any:
        """Run ``callback(future)`` when ``future`` is complete and the callbacks before it have returned.

        It runs in this thread if that is now the case, unless an event loop runs here: a callback may block.
        """
        turn: Future[None] = Future()
        child = original(turn, lambda _: callback(future))
        if child is not None:
            _orders[child] = self, True
        # Attached by a callback: part of it, or other ranks might attach the next one before.
        if running.get(threading.get_ident()) is self and future.done():
            turn.set_result(None)
            return child
        with self._lock:
            self._waiting.append((future, turn))
            at_once = len(self._waiting) == 1 and _get_running_loop() is None and self._take_turn()
        if at_once:
            self._run(turn)
        self.proceed_in_thread()
        return child

    def proceed(self) -> None:
        """Run the callbacks whose turn it is. A future of this order calls it when it is complete."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                turn = self._waiting[0][1]
                if not self._take_turn():
                    return
            self._run(turn)

    def proceed_in_thread(self) -> None:
        """Run the callbacks whose turn it is in another thread."""
        if self._waiting:
            call_in_thread(self.proceed)

    def _take_turn(self) -> bool:
        """Remove the first callback and return True if it can run. Called under the lock."""
        if self._is_running or not self._waiting[0][0].done():
            return False
        self._waiting.popleft()
        self._is_running = True
        return True

    def _run(self, turn: Future[None]) -> None:
        thread = threading.get_ident()
        outer, running[thread] = running.get(thread), self
        try:
            turn.set_result(None)
        finally:
            if outer is None:
                del running[thread]
            else:
                running[thread] = outer
            with self._lock:
                self._is_running = False

    # -- groups for the collectives of callbacks -----------------------------------------------

    def within(self, outer: CallbackOrder, group: Group) -> tuple[Group, CallbackOrder]:
        """Return the group on which callbacks of ``outer`` call the collectives of ``group``, and its order."""
        with self._lock:
            if outer not in self._within:
                sibling = group._sibling("its callbacks" if outer is self else f"callbacks of {outer._name}")
                self._within[outer] = sibling, order_of(sibling)
            sibling, order = self._within[outer]
        sibling.timeout = group.timeout
        return sibling, order

    def abort(self, reason: str) -> None:
        """Fail the pending collectives of callbacks, on every rank."""
        for sibling, order in list(self._within.values()):
            sibling.abort(reason)
            order.abort(reason)

    def close(self) -> None:
        """Destroy the groups of callbacks on this rank."""
        for sibling, order in list(self._within.values()):
            sibling.close()
            order.close()


_order_of: WeakKeyDictionary[Group, CallbackOrder] = WeakKeyDictionary()


def order_of(group: Group) -> CallbackOrder:
    order = _order_of.get(group)
    if order is None:
        order = _order_of[group] = CallbackOrder(f"{group.name} {group.channel.number:x}")
    return order


# -- methods of torch's futures ---------------------------------------------------------------------


def attach(original: AnyFunction, future: Any, callback: AnyFunction) -> Any:
    """Attach a callback, as ``then`` and ``add_done_callback`` do."""
    order = _orders.get(future)
    return original(future, callback) if order is None else order[0].attach(original, future, callback)


def collect_all(original: AnyFunction, futures: Any) -> Any:
    """Return a future of all futures. Its callbacks have an order if these have one: that of the same group."""
    collected = original(futures)
    found = [_orders.get(each) for each in futures]
    orders = {None if each is None else each[0] for each in found}
    if len(orders) == 1 and (order := orders.pop()) is not None:
        # Before it has an order: torch completes it in C++, maybe after the works' threads have called `proceed`.
        collected.add_done_callback(lambda _: order.proceed_in_thread())
        _orders[collected] = order, any(each is not None and each[1] for each in found)
    return collected


def wait(original: AnyFunction, future: Any) -> Any:
    """Wait for a future, unless it is the result of a callback that waits for the callback in this thread to return."""
    if running and not future.done():
        order = _orders.get(future)
        if order is not None and order[1] and running.get(threading.get_ident()) is order[0]:
            raise UsageError(
                "a callback of a future waits for the result of a callback that runs after it: callbacks of one process "
                "group run one at a time, in the order of the calls of then()"
            )
    return original(future)
