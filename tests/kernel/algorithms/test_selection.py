"""The selection of schedules: the cheapest in the model, or the forced one if it can run; and the explanation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.config import Config
from asyncdist.errors import UsageError
from asyncdist.kernel.algorithms import recursive_doubling
from asyncdist.kernel.algorithms.cost import Cost
from asyncdist.kernel.algorithms.selection import CANDIDATES, DEFAULT, Model, candidates, choose, explain, forced_by

collectives = st.sampled_from(sorted(CANDIDATES))
world_sizes = st.integers(1, 64)
byte_counts = st.integers(0, 1 << 32)


def test_small_tensors_take_few_rounds_and_large_ones_few_bytes() -> None:
    assert choose("all_reduce", 4, 8) == "doubling"
    assert choose("all_reduce", 25 << 20, 8) == "halving"
    assert choose("all_reduce", 25 << 20, 8, contiguous=False) == "ring"
    assert choose("all_reduce", 25 << 20, 6) == "ring"
    assert choose("broadcast", 4, 8) == "tree"
    assert choose("broadcast", 100 << 20, 8) == "chain"
    assert choose("reduce", 4, 8) == "tree"
    assert choose("reduce", 25 << 20, 8) == "pairwise"
    assert choose("all_gather", 4, 2) == "direct"
    assert choose("all_gather", 4, 16) == "doubling"


@given(collective=collectives, nbytes=byte_counts, size=world_sizes, contiguous=st.booleans())
def test_chosen_schedule_applies_and_is_the_cheapest(collective: str, nbytes: int, size: int, contiguous: bool) -> None:
    chosen = choose(collective, nbytes, size, contiguous=contiguous)
    price = {
        candidate.name: DEFAULT.seconds(candidate.cost(size, nbytes, DEFAULT))
        for candidate in candidates(collective)
        if candidate.applies(size, contiguous)
    }
    assert price[chosen] == min(price.values())


@given(collective=collectives, nbytes=byte_counts, size=world_sizes, data=st.data(), contiguous=st.booleans())
def test_forced_schedule_is_used_if_it_applies(
    collective: str, nbytes: int, size: int, data: st.DataObject, contiguous: bool
) -> None:
    wanted = data.draw(st.sampled_from(candidates(collective)))
    chosen = choose(collective, nbytes, size, forced={collective: wanted.name}, contiguous=contiguous)
    if wanted.applies(size, contiguous):
        assert chosen == wanted.name
    else:
        assert chosen == choose(collective, nbytes, size, contiguous=contiguous)


@given(collective=collectives, nbytes=byte_counts, size=world_sizes)
def test_costs_grow_with_bytes(collective: str, nbytes: int, size: int) -> None:
    for candidate in candidates(collective):
        less, more = (DEFAULT.seconds(candidate.cost(size, n, DEFAULT)) for n in (nbytes, nbytes + (1 << 20)))
        assert 0 <= less <= more


@pytest.mark.parametrize("collective", CANDIDATES)
def test_one_rank_costs_nothing_and_some_schedule_always_applies(collective: str) -> None:
    for candidate in candidates(collective):
        assert candidate.cost(1, 1 << 30, DEFAULT) == Cost()
    assert all(candidates(collective)[0].applies(size, contiguous=False) for size in range(1, 65))


def test_small_calls_of_a_crowd_on_few_cores_take_a_tree() -> None:
    chosen = [
        choose(collective, 4, ranks, model=Model(cores=cores))
        for collective in ("barrier", "all_reduce")
        for ranks, cores in ((64, 64), (64, 32), (64, 16), (64, 2), (33, 2), (32, 2))
    ]
    assert chosen[:6] == ["dissemination", "dissemination", "tree", "tree", "tree", "dissemination"]
    assert chosen[6:] == ["doubling", "doubling", "tree", "tree", "tree", "doubling"]


def test_choice_depends_on_the_weights_of_the_model() -> None:
    far = Model(alpha=1.0, beta=0.0, gamma=0.0, overhead=0.0)
    thin = Model(alpha=0.0, beta=1.0, gamma=0.0, overhead=0.0)
    assert choose("all_gather", 1 << 20, 16, model=far) == "direct"
    assert choose("all_reduce", 1 << 30, 6, model=far) == "doubling"
    assert choose("all_reduce", 4, 6, model=thin) == "ring"
    assert choose("broadcast", 1 << 20, 8, model=Model(segment_nbytes=1 << 20)) == "tree"
    assert choose("broadcast", 1 << 20, 8, model=Model(segment_nbytes=64 << 10)) == "chain"


def test_seconds_are_the_weighted_sum_of_the_cost() -> None:
    model = Model(alpha=1, beta=10, gamma=100, overhead=1000)
    assert model.seconds(Cost(rounds=1, messages=2, nbytes=3, reduced=4)) == 1 + 2000 + 30 + 400
    assert recursive_doubling.all_reduce_cost(4, 100) == Cost(rounds=2, messages=2, nbytes=200, reduced=200)
    assert recursive_doubling.all_reduce_cost(5, 100) == Cost(rounds=4, messages=4, nbytes=400, reduced=300)
    assert recursive_doubling.halving_all_reduce_cost(4, 100) == Cost(rounds=4, messages=4, nbytes=150, reduced=75)
    assert CANDIDATES["all_reduce"][1].cost(5, 100, DEFAULT) == Cost(rounds=8, messages=8, nbytes=160, reduced=80)


# -- forcing ---------------------------------------------------------------------------------------


def test_forced_schedules_are_parsed() -> None:
    assert forced_by(Config()) == {}
    config = Config(algorithm=" all_reduce = ring , broadcast=tree, ")
    assert forced_by(config) == {"all_reduce": "ring", "broadcast": "tree"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all_reduce=rign", "no schedule 'rign' for all_reduce; there are doubling, ring, halving, tree"),
        ("allreduce=ring", "no collective 'allreduce'; there are all_reduce, broadcast, reduce"),
        ("ring", "'ring' is not of the form collective=schedule"),
        ("all_reduce=", "no schedule '' for all_reduce"),
        ("all_reduce=ring,all_reduce=halving", "all_reduce is given twice, as ring and as halving"),
    ],
)
def test_error_of_an_invalid_forced_schedule_names_the_valid_ones(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^ASYNCDIST_ALGORITHM='{text}': .*{message}"):
        forced_by(Config(algorithm=text))


def test_unknown_names_are_refused_by_choose_too() -> None:
    with pytest.raises(ValueError, match="no collective 'all_reduec'"):
        choose("all_reduec", 4, 2)
    with pytest.raises(ValueError, match="no schedule 'star' for all_reduce"):
        choose("all_reduce", 4, 2, forced={"all_reduce": "star"})


# -- explaining ------------------------------------------------------------------------------------


def test_explain_prices_each_candidate_that_can_run() -> None:
    small, large = explain("all_gather", 6, [1 << 10, 1 << 24])
    assert (small.nbytes, large.nbytes) == (1 << 10, 1 << 24)
    assert small.microseconds["doubling"] is None
    for row in (small, large):
        prices = {name: price for name, price in row.microseconds.items() if price is not None}
        assert row.chosen == min(prices, key=prices.__getitem__)
    assert small.microseconds["direct"] == pytest.approx(5 + 5 * 7 + 5 / 6 * 1024 * 0.35e-3)


def test_explain_shows_the_forced_schedule() -> None:
    (row,) = explain("all_reduce", 4, [4], forced={"all_reduce": "ring"})
    assert row.chosen == "ring"


def test_partial_sums_wider_than_the_tensor_count_with_their_own_size():
    # Between two ranks both schedules send the tensor once, and doubling needs fewer rounds.
    slow = Model(alpha=300e-6, beta=8e-9, gamma=0.0)
    assert choose("all_reduce", 25 << 20, 2, model=slow) == "doubling"
    assert choose("all_reduce", 25 << 20, 2, model=slow, widening=2) != "doubling"
    assert choose("all_reduce", 4, 2, model=slow, widening=2) == "doubling"
