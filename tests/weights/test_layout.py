"""Layouts and manifests: where tensors lie, and what damaged ones are refused for."""

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.errors import ProtocolError, UnsupportedError
from asyncdist.weights.content.layout import BLOCK_NBYTES, Manifest, WeightsLayout, layout_of

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]


def manifest_of(layout):
    return Manifest(layout, np.arange(len(layout.blocks), dtype=np.uint64))


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 700), max_size=3).map(tuple)), max_size=12))
def test_blocks_cover_each_tensor_once_and_lie_apart(specs):
    layout = WeightsLayout([(f"tensor{number}", dtype, shape) for number, (dtype, shape) in enumerate(specs)])
    end = 0
    covered = dict.fromkeys(layout.places, 0)
    for block in layout.blocks:
        assert block.offset >= end
        assert block.offset == block.place.offset + covered[block.place.name]
        assert 0 < block.nbytes <= BLOCK_NBYTES
        covered[block.place.name] += block.nbytes
        end = block.offset + block.nbytes
    assert end <= layout.nbytes
    assert covered == {place.name: place.nbytes for place in layout.places.values()}
    assert all(place.offset % 64 == 0 for place in layout.places.values())
    assert layout.count_blocks() == len(layout.blocks)

    manifest = manifest_of(layout)
    read = Manifest.decode(manifest.encode())
    assert read.layout.places == layout.places
    assert read.layout.key == layout.key
    assert (read.digests == manifest.digests).all()


def test_tied_parameters_share_a_place():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight = model[0].weight
    layout = layout_of(model.state_dict())
    assert layout.places["1.weight"].shared_with == "0.weight"
    assert layout.places["1.weight"].offset == layout.places["0.weight"].offset
    assert [block.place.name for block in layout.blocks] == ["0.weight", "0.bias", "1.bias"]


def test_views_of_one_memory_with_other_shapes_have_their_own_places():
    whole = torch.arange(12.0)
    layout = layout_of({"flat": whole, "matrix": whole.view(3, 4), "half": whole[:6]})
    assert all(place.shared_with is None for place in layout.places.values())


@pytest.mark.parametrize(
    ("tensor", "match"),
    [(torch.eye(3).to_sparse(), "only dense tensors"), (torch.nn.LazyLinear(3).weight, "run one forward first")],
)
def test_tensor_that_cannot_be_published_is_named(tensor, match):
    with pytest.raises(UnsupportedError, match=f"layer.weight .*{match}"):
        layout_of({"layer.weight": tensor})


@given(st.binary(max_size=200))
def test_other_bytes_are_no_manifest(data):
    with pytest.raises(ProtocolError):
        Manifest.decode(data)


@pytest.mark.parametrize(
    "fields",
    [
        (2, [], b""),
        (1, [["w", 7, [4], None]], b""),
        (1, [["w", 7, [4], None]], b"1234567"),
        (1, [["w", 7, [1 << 60], None]], bytes(8)),
        (1, [["w", 7, [1 << 40, 1 << 40], None]], bytes(8)),
        (1, [["w", 7, [-1], None]], bytes(8)),
        (1, [["w", 999, [4], None]], bytes(8)),
        (1, [["w", 7, [4], None], ["w", 7, [4], None]], bytes(16)),
        (1, [["v", 7, [4], "missing"]], b""),
        (1, [[3, 7, [4], None]], bytes(8)),
        (1, "text", b""),
    ],
)
def test_damaged_manifest_is_refused(fields):
    with pytest.raises(ProtocolError):
        Manifest.decode(msgpack.packb(fields))


def test_every_cut_of_a_manifest_is_refused():
    whole = manifest_of(layout_of(torch.nn.Linear(300, 1000).state_dict())).encode()
    for end in range(len(whole)):
        with pytest.raises(ProtocolError):
            Manifest.decode(whole[:end])
