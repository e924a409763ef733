"""`asyncdist.kernel.engine.drivers.turns`: which threads drive their own operations, and when others take over."""

from __future__ import annotations

import threading

from asyncdist.kernel.engine.drivers.turns import Promises


def test_promise_belongs_to_its_thread_and_ends_with_a_hand_over():
    handed_over = []
    promises = Promises(lambda: handed_over.append(promises.is_made_here()))
    elsewhere = []
    with promises.make():
        thread = threading.Thread(target=lambda: elsewhere.append(promises.is_made_here()))
        thread.start()
        thread.join()
        with promises.make():
            assert promises.is_made_here()
        assert promises.is_made_here()
        assert (elsewhere, handed_over) == ([False], [])
    assert not promises.is_made_here()
    assert handed_over == [False]


def test_others_take_over_while_a_promise_is_withdrawn():
    handed_over = []
    promises = Promises(lambda: handed_over.append(promises.is_made_here()))
    with promises.make(made=False):
        assert handed_over == []
    with promises.make():
        with promises.make(made=False):
            assert not promises.is_made_here()
            assert handed_over == [False]
        assert promises.is_made_here()
    assert handed_over == [False, False]
