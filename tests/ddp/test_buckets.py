import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.ddp import buckets

KINDS = st.sampled_from(["float32", "bfloat16", "float64"])


@st.composite
def models(draw):
    parameters = draw(st.lists(st.tuples(st.integers(0, 3000), KINDS), min_size=0, max_size=40))
    order = draw(st.permutations(range(len(parameters))))
    limits = draw(st.lists(st.integers(1, 4000), min_size=1, max_size=4))
    return [n for n, _ in parameters], [k for _, k in parameters], order, limits


@given(models())
def test_every_parameter_is_in_one_bucket_of_its_kind_in_order(model):
    nbytes, kinds, order, limits = model
    layout = buckets.assign(nbytes, kinds, order, limits)
    position = {parameter: at for at, parameter in enumerate(order)}
    assert sorted(p for bucket in layout for p in bucket) == sorted(order)
    for bucket in layout:
        assert len({kinds[p] for p in bucket}) == 1
        assert [position[p] for p in bucket] == sorted(position[p] for p in bucket)
    last = [position[bucket[-1]] for bucket in layout]
    assert last == sorted(last)


@given(models())
def test_bucket_exceeds_its_cap_by_less_than_its_last_parameter(model):
    nbytes, kinds, order, limits = model
    layout = buckets.assign(nbytes, kinds, order, limits)
    for kind in set(kinds):
        own = [bucket for bucket in layout if kinds[bucket[0]] == kind]
        for turn, bucket in enumerate(own):
            cap = limits[min(turn, len(limits) - 1)]
            sizes = [nbytes[p] for p in bucket]
            assert sum(sizes[:-1]) < cap
            if turn < len(own) - 1:
                assert sum(sizes) >= cap


@given(models())
def test_one_kind_and_one_order_make_consecutive_buckets(model):
    nbytes, _, order, limits = model
    layout = buckets.assign(nbytes, ["float32"] * len(nbytes), order, limits)
    assert [p for bucket in layout for p in bucket] == list(order)


def test_first_bucket_is_small_and_initial_order_is_reverse_definition():
    mib = buckets.MIB
    nbytes = [mib, 8 * mib, 20 * mib, 8 * mib, mib // 2, mib // 2]
    order = buckets.definition_order(len(nbytes))
    assert buckets.assign(nbytes, ["f"] * 6, order, buckets.caps(25)) == ((5, 4), (3, 2), (1, 0))


def test_buckets_are_ordered_by_their_last_parameter():
    layout = buckets.assign([4, 4, 4, 4], ["a", "b", "b", "a"], [0, 1, 2, 3], [8])
    assert layout == ((1, 2), (0, 3))


@given(st.integers(0, 30).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, max(0, n - 1)), max_size=n))))
def test_arrival_order_appends_parameters_without_gradients(case):
    count, arrived = case
    arrived = [p for p in dict.fromkeys(arrived) if p < count]
    order = buckets.arrival_order(arrived, count)
    assert order[: len(arrived)] == arrived
    assert sorted(order) == list(range(count))


def test_caps():
    assert buckets.caps(25) == (1 << 20, 25 << 20)
    assert buckets.caps(0.25) == (1 << 18, 1 << 18)
    assert buckets.caps(100) == (1 << 20, 100 << 20)
    for wrong in (0, -1, 1e-9):
        with pytest.raises(ValueError, match="bucket_cap_mb"):
            buckets.caps(wrong)


@pytest.mark.parametrize(
    ("gbit", "mib"), [(0.01, 1), (0.1, 1), (0.5, 1), (0.9, 2), (1, 2), (1.1, 2), (2.5, 8), (5, 16), (10, 25), (100, 25)]
)
def test_cap_for_a_link_grows_with_its_rate(gbit, mib):
    assert buckets.cap_for_link(8e-9 / gbit) == mib << 20


def test_link_that_takes_no_time_has_the_largest_cap():
    assert buckets.cap_for_link(0.0) == 25 << 20


def test_incomplete_and_duplicate_orders_are_refused():
    with pytest.raises(ValueError, match="twice"):
        buckets.assign([1, 1], ["a", "a"], [0, 0], [8])
    with pytest.raises(ValueError, match="1 of 2"):
        buckets.assign([1, 1], ["a", "a"], [0], [8])
