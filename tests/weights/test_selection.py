"""Selections: the parts of a version that a reader has, and their bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.errors import ProtocolError, UsageError
from asyncdist.weights.content.layout import layout_of
from asyncdist.weights.content.selection import Selection, flat_range, select, whole_selection

STATE = {
    "embedding": torch.zeros(100, 16),
    "column": torch.zeros(32, 64),
    "row": torch.zeros(64, 32),
    "norm": torch.ones(16),
}
LAYOUT = layout_of(STATE)
SHAPES = {name: tuple(tensor.shape) for name, tensor in STATE.items()}


def test_all_tensors_are_the_whole_version():
    assert select(LAYOUT, SHAPES, None).key == ""
    assert select(LAYOUT, dict(reversed(SHAPES.items())), {}).layout is LAYOUT
    assert select(LAYOUT, SHAPES, lambda name, shape: slice(0, shape[0])).key == ""


def test_selection_has_only_the_bytes_of_its_parts():
    slices = {"column": (slice(8, 16),), "row": (slice(None), slice(8, 16))}
    selection = select(LAYOUT, {"column": (8, 64), "row": (64, 8), "norm": (16,)}, slices)
    assert sum(block.nbytes for block in selection.layout.blocks) == 4 * (8 * 64 + 64 * 8 + 16)
    assert selection.part("row", STATE["row"]).shape == (64, 8)
    assert selection.part("norm", STATE["norm"]) is STATE["norm"]


def test_selections_are_equal_when_their_parts_are():
    first = select(LAYOUT, {"column": (8, 64)}, {"column": slice(8, 16)})
    second = select(LAYOUT, {"column": (8, 64)}, lambda name, shape: (slice(8, 16), slice(None)))
    other = select(LAYOUT, {"column": (8, 64)}, {"column": slice(0, 8)})
    assert first.key == second.key != other.key
    assert first.key


def test_selection_travels_as_plain_data():
    selection = select(LAYOUT, {"column": (8, 64), "norm": (16,)}, {"column": slice(8, 16)})
    again = Selection.of_description(LAYOUT, [[name, ranges] for name, ranges in selection.describe()])
    assert again == selection or again.key == selection.key
    assert again.layout.places == selection.layout.places


@pytest.mark.parametrize(
    "description",
    [
        [["missing", None]],
        [["norm", [[0, 17]]]],
        [["norm", [[9, 3]]]],
        [["norm", [[-1, 3]]]],
        [["norm", [[0, 4], [0, 4]]]],
        [["norm"]],
        [["norm", [["a", "b"]]]],
        5,
    ],
)
def test_selection_of_parts_that_do_not_exist_is_refused(description):
    with pytest.raises(ProtocolError):
        Selection.of_description(LAYOUT, description)


@pytest.mark.parametrize(
    ("wanted", "slices", "match"),
    [
        ({"head": (3,)}, None, "no 'head'"),
        ({"norm": (8,)}, None, r"norm has the shape \[8\] .* \[16\]"),
        ({"norm": (8,)}, {"norm": slice(0, 4)}, r"\[8\].*\[4\] of \[16\]"),
        ({"norm": (8,)}, {"norm": slice(0, 16, 2)}, "step of 1"),
        ({"norm": (8,)}, {"norm": (slice(0, 8), slice(0, 1))}, "at most 1 slices"),
        ({"norm": (8,)}, {"norm": (3,)}, "at most 1 slices"),
    ],
)
def test_reader_that_does_not_fit_is_told_why(wanted, slices, match):
    with pytest.raises(UsageError, match=match):
        select(LAYOUT, wanted, slices)


def test_tied_tensors_stay_tied_in_a_selection():
    shared = torch.zeros(16, 4)
    layout = layout_of({"input": shared, "output": shared, "other": torch.zeros(3)})
    selection = select(layout, {"input": (8, 4), "output": (8, 4)}, lambda name, shape: slice(8, 16))
    assert selection.layout.places["output"].shared_with == "input"
    assert whole_selection(layout).layout is layout


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.permutations(range(4)), st.data())
def test_flat_range_has_the_elements_of_a_contiguous_copy(sizes, order, data):
    tensor = torch.arange(torch.Size(sizes).numel()).view(sizes)
    tensor = tensor.permute([each for each in order if each < len(sizes)])
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    if start < stop:
        part = flat_range(tensor, start, stop)
        assert part.is_contiguous()
        assert part.tolist() == tensor.contiguous().view(-1)[start:stop].tolist()
