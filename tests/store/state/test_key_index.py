"""The ordered index of keys against a plain set of the same keys."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from asyncdist.store.state import key_index
from asyncdist.store.state.key_index import KeyIndex

KEYS = st.text("a/\0é\U0010ffff", max_size=4)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(key_index, "_BLOCK", 2)


@given(st.lists(KEYS, unique=True), st.lists(KEYS), KEYS)
def test_keys_under_a_prefix_are_those_of_a_dict_in_both_orders(before, changes, prefix):
    index, keys = KeyIndex(before), dict.fromkeys(before)
    for key in changes:
        if key in keys:
            del keys[key]
            index.remove(key)
        else:
            keys[key] = None
            index.add(key)
        expected = [each for each in keys if each.startswith(prefix)]
        assert index.oldest_first(prefix) == expected
        assert index.under(prefix) == sorted(expected)
        assert index.count(prefix) == len(expected)
    assert index.oldest_first("") == list(keys)


class Visited(str):
    """A key that counts how often it is looked at."""

    __slots__ = ()
    count = 0

    def startswith(self, *args):
        Visited.count += 1
        return super().startswith(*args)


def test_keys_outside_of_the_prefix_are_not_visited(monkeypatch):
    monkeypatch.undo()
    index = KeyIndex([Visited(f"{folder}/{number}") for folder in range(100) for number in range(100)])
    Visited.count = 0
    assert len(index.under("7/")) == 100
    assert Visited.count < 1000
