"""The header of every message: packing and unpacking, and the fingerprints of calls."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from asyncdist.kernel.transport.wire_format import (
    ABORT,
    HEADER_NBYTES,
    KEY_NBYTES,
    Fingerprint,
    pack_header,
    pack_key,
    shape_checksum,
    unpack_tail,
)

WIDTHS = {"collective": 6, "dtype": 6, "reduction": 4, "root": 12, "count": 24, "shape": 12}
fingerprints = st.fixed_dictionaries({name: st.integers(0, (1 << width) - 1) for name, width in WIDTHS.items()})


@given(fingerprints, st.sampled_from(list(WIDTHS)), st.integers(0, 1 << 40))
def test_fingerprint_is_unpacked_also_after_an_overflow_of_one_field(fields, name, excess):
    overflowing = Fingerprint(**{**fields, name: fields[name] + (excess << WIDTHS[name])})
    word = overflowing.pack()
    assert 0 <= word < 1 << 64
    assert Fingerprint.unpack(word) == Fingerprint(**fields)


@given(fingerprints, fingerprints)
def test_differences_are_named(one, other):
    differing = [name for name in WIDTHS if one[name] != other[name]]
    assert Fingerprint(**one).differences(Fingerprint(**other)) == differing


def test_shapes_with_equal_element_counts_have_different_checksums():
    pairs = [(24, 1), (1, 24), (2, 12), (12, 2), (3, 8), (8, 3), (4, 6), (6, 4)]
    shapes = [*itertools.permutations((2, 3, 4)), (24,), *pairs]
    checksums = [shape_checksum(shape) for shape in shapes]
    assert len(set(checksums)) == len(shapes)
    assert [shape_checksum(list(shape)) for shape in shapes] == checksums


def test_shape_checksum_uses_all_bits():
    checksums = [shape_checksum(shape) for shape in itertools.product(range(1, 65), repeat=2)]
    assert max(checksums) < 1 << WIDTHS["shape"]
    assert len(set(checksums)) > 2000  # 4096 random values would give 2589


def test_header_is_unpacked_and_sequence_numbers_wrap_around():
    key = pack_key((1 << 64) - 1, (1 << 32) + 7, (1 << 32) - 1)
    assert key == pack_key((1 << 64) - 1, 7, (1 << 32) - 1)
    header = pack_header(key, (1 << 64) - 1, 1 << 40, ABORT)
    assert (len(key), len(header)) == (KEY_NBYTES, HEADER_NBYTES) == (16, 36)
    assert header[:KEY_NBYTES] == key
    assert unpack_tail(header) == ((1 << 64) - 1, 1 << 40, ABORT)
