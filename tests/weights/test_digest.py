"""The digest of a block changes with every change of its bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.weights.content.digest import digest
from asyncdist.weights.content.layout import BLOCK_NBYTES

SIZES = [0, 1, 7, 8, 4095, 4096, 4097, 12288, 100_000, BLOCK_NBYTES]


def block(nbytes):
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", SIZES)
def test_equal_bytes_have_equal_digests(nbytes):
    data = block(nbytes)
    assert digest(data) == digest(data.copy())
    assert 0 <= digest(data) < 1 << 64


@given(st.sampled_from(SIZES[1:]), st.integers(0), st.integers(1, 255))
def test_one_changed_byte_changes_the_digest(nbytes, where, difference):
    data = block(nbytes)
    before = digest(data)
    data[where % nbytes] ^= difference
    assert digest(data) != before


@given(st.integers(0, 62), st.integers(0, 511), st.integers(0, 63))
def test_one_flipped_bit_of_a_word_changes_the_digest(row, column, bit):
    data = block(63 * 4096)
    before = digest(data)
    data.view("<u8").reshape(63, 512)[row % 63, column] ^= np.uint64(1 << bit)
    assert digest(data) != before


@given(st.integers(0, 15), st.integers(0, 15))
def test_rows_in_another_order_change_the_digest(first, second):
    data = block(16 * 4096)
    swapped = data.copy().reshape(16, -1)
    swapped[[first, second]] = swapped[[second, first]]
    assert (digest(swapped.reshape(-1)) == digest(data)) == (first == second)


def test_shifted_bytes_and_trailing_zeros_change_the_digest():
    data = block(8 * 4096)
    assert digest(np.roll(data, 4096)) != digest(data)
    assert digest(np.roll(data, 8)) != digest(data)
    assert digest(np.concatenate([data, np.zeros(1, np.uint8)])) != digest(data)
    assert digest(np.zeros(4096, np.uint8)) != digest(np.zeros(8192, np.uint8))


def test_digest_is_the_same_in_every_release():
    assert digest(np.arange(256, dtype=np.uint8)) == 0x4F46B2ED343608A3
    assert digest(np.tile(np.arange(256, dtype=np.uint8), 48)) == 0x3CD22CE669D62456
