"""Programs of torch.distributed over asyncdist: every collective, message and group, and what torch builds on them.

The same programs over gloo give the expected results; those that gloo refuses return pairs of actual and expected ones. The
sum of two tensors does not depend on their order, so two ranks agree bit for bit, as do programs without reductions. Sums
of four ranks agree within a tolerance. gloo rounds narrow floats after every addition, asyncdist once.
tests/ddp/test_table.py compares each argument, method and hook of DistributedDataParallel.
"""

import inspect
import shutil

import pytest
import torch.distributed as dist

from tests.torch_backend.conftest import PATIENCE
from tests.torch_backend.toys import bindings

EXHAUSTIVE = [pytest.mark.exhaustive]
WEIGHTS_ONLY = pytest.mark.skipif(
    "weights_only" not in inspect.signature(dist.all_gather_object).parameters,
    reason="object collectives take weights_only from torch 2.15 on",
)
NAN_CHECK = pytest.mark.skipif(not hasattr(bindings, "NanCheckHook"), reason="torch has the hook from 2.14 on")
COMPILERS = ("c++", "g++", "clang++")
COMPILER = pytest.mark.skipif(
    not any(shutil.which(name) for name in COMPILERS),
    reason=f"inductor needs a C++ compiler: none of {COMPILERS} is here",
)
pytestmark = pytest.mark.processes


def programs(module, *names, marks=(), **how):
    """Return the parameters of tests: a module, a function and its arguments, and how its results are compared."""
    named = [(name,) if isinstance(name, str) else name for name in names]
    return [pytest.param(module, *name[:1], name[1:], how, id=" ".join([module, *name]), marks=marks) for name in named]


def each(function, *arguments):
    return [(function, argument) for argument in arguments]


OVER_GLOO = [
    *programs("collectives", *each("all_reduce", "floats", "integers", "bools", "complex")),
    *programs(
        "collectives", "all_reduce_sparse", "all_reduce_coalesced", "coalescing_manager", "asynchronous", "futures",
        "broadcast", "reduce", "gather", "scatter", "all_gather", "all_gather_into_tensor", "all_gather_coalesced",
        "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single", "all_to_all", "barriers", "objects",
        "forms_of_methods", "forms_that_do_not_exist",
    ),
    *programs("collectives", "objects_of_safe_types", marks=WEIGHTS_ONLY),
    *programs("collectives", "checked_for_nan", marks=NAN_CHECK),
    *programs(
        "peers", "send_and_receive", "tags", "from_any_source", "from_any_source_in_a_group", "batches",
        "by_group_rank", "in_groups", "outside_a_group", "subgroups", "groups_made_locally", "destroyed_in_any_order",
        "names", "sequence_numbers",
    ),
    *programs(
        "ddp", "starts_from_rank_0", "in_a_subgroup", "custom_hook", "joined", "join_throws_on_early_termination",
        "joined_custom_joinable", "zero_redundancy", sums=True,
    ),
    *programs("ddp", "hooks_of_cpp", close=2e-3),
    *programs(
        "functional", "functional_reductions", "functional_exchanges", "functional_groups", "functional_autograd",
        "differentiable_collectives", "operators_with_outputs", "batches_of_operators",
    ),
    *programs(
        "functional", "compiled_ahead_of_time", "compiled_around_calls", marks=EXHAUSTIVE, patience=90.0
    ),
    *programs(
        "functional", "compiled_by_inductor", "compiled_plain_names", "compiled_training",
        marks=[*EXHAUSTIVE, COMPILER], sums=True, patience=90.0,
    ),
    *programs(
        "pipeline", *each("trained", "GPipe", "1F1B", "interleaved 1F1B", "looped BFS", "interleaved zero bubble",
                          "ZBV zero bubble"), "evaluated", "sharded_stages",
    ),
    *programs("pipeline", "traced", marks=EXHAUSTIVE),
    *programs("mesh", "mesh_of_two_dimensions", "mesh_of_some_ranks", "mesh_from_a_group"),
    *programs(
        "mesh", "redistribute", "redistribute_in_two_dimensions", "redistribute_asynchronously_and_backward", "multiply",
        "distributed_from_rank_0", marks=EXHAUSTIVE,
    ),
    *programs(
        "mesh", "operators", "module_distributed", "sequence_parallel", "sharded_embeddings", "sharded_losses",
        marks=EXHAUSTIVE, sums=True,
    ),
    *programs(
        "sharded", *each("first_version", "plain", "original parameters", "gradients and optimizer", "not sharded",
                         "mixed precision"), sums=True,
    ),
    *programs(
        "sharded", *each("variant", "plain", "kept after forward", "resharded to smaller groups", "mixed precision",
                         "offloaded"),
        "in_memory_of_the_group", "hybrid", "other_reductions", "accumulated", "clipped_norm", "whole_state",
        "above_tensor_parallel", "first_version_hybrid", "first_version_sharded_state", "first_version_clipped_norm",
        marks=EXHAUSTIVE, sums=True,
    ),
    *programs("sharded", ("variant", "bfloat16 sums"), close=2e-2),
]  # fmt: skip

BEYOND_GLOO = [
    *programs(
        "beyond_gloo", "stacked_outputs", "scaled_sums", "after_a_group_made_locally", "together_with_gloo",
        "callbacks_that_block", "callbacks_in_order", "callbacks_within_callbacks", "more_callbacks_than_threads",
        "callbacks_of_collected_futures", "callback_that_waits_for_a_later_one", "future_of_a_completed_work",
        "second_interface", "methods_of_the_group", "awaited",
    ),
    *programs("threads", "stays_in_its_thread"),
    *programs("ddp", "where_buckets_lie", "exact_in_registered_buckets", "hook_power_sgd_of_several_buckets"),
    *programs("refusals", "devices", "counts", "by_cpp", "features_of_later_releases"),
    *programs("sharded", "mean_of_shares"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "program", "arguments", "how"), OVER_GLOO)
def test_program_gives_the_results_of_gloo(same_over_gloo, world, module, program, arguments, how):
    close = how.get("close", how.get("sums", False) and world > 2)
    same_over_gloo(f"programs_{module}", program, *arguments, close=close, patience=how.get("patience", PATIENCE))


@pytest.mark.parametrize(("module", "program", "arguments", "how"), BEYOND_GLOO)
def test_program_that_gloo_refuses_gives_the_expected_results(as_expected, module, program, arguments, how):
    as_expected(f"programs_{module}", program)
