"""The registry of living objects: who is in it, and what threads may do to it."""

import gc
import threading

from asyncdist.base.lifecycle import WeakRegistry


class Thing:
    """An object without a hash or an equality of its own, which can be referenced weakly."""

    __hash__ = None


def test_objects_are_listed_until_they_are_discarded_or_collected():
    registry = WeakRegistry()
    one, two, three = Thing(), Thing(), Thing()
    for each in (one, two, two, three):
        registry.add(each)
    registry.discard(one)
    registry.discard(one)
    assert registry.living() == [two, three]
    del two, each
    gc.collect()
    assert registry.living() == [three]
    registry.clear()
    assert registry.living() == []


def test_threads_may_add_while_another_one_lists():
    registry, stopping, errors = WeakRegistry(), threading.Event(), []
    kept = [Thing() for _ in range(500)]
    for each in kept:
        registry.add(each)

    def add_and_drop():
        while not stopping.is_set():
            try:
                things = [Thing() for _ in range(50)]
                for thing in things:
                    registry.add(thing)
                registry.discard(things[0])
            except RuntimeError as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=add_and_drop) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            assert len(registry.living()) >= len(kept)
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    assert not errors
