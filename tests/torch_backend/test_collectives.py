"""Every collective, point-to-point operation and group of torch.distributed, compared with the same over gloo."""

import inspect

import pytest
import torch.distributed as dist

from tests.torch_backend.toys import bindings

pytestmark = pytest.mark.processes
OBJECTS_OF_SAFE_TYPES = pytest.param(
    "objects_of_safe_types",
    marks=pytest.mark.skipif(
        "weights_only" not in inspect.signature(dist.all_gather_object).parameters,
        reason="object collectives take weights_only from torch 2.15 on",
    ),
)
CHECKED_FOR_NAN = pytest.param(
    "checked_for_nan",
    marks=pytest.mark.skipif(not hasattr(bindings, "NanCheckHook"), reason="torch has the hook from 2.14 on"),
)


@pytest.mark.parametrize("kind", ["floats", "integers", "bools", "complex"])
def test_all_reduce_of_every_dtype_and_reduction(same_over_gloo, kind):
    same_over_gloo("programs_collectives", "all_reduce", kind)


@pytest.mark.parametrize(
    "program",
    [
        "all_reduce_sparse", "all_reduce_coalesced", "coalescing_manager", "asynchronous", "futures", "broadcast",
        "reduce", "gather", "scatter", "all_gather", "all_gather_into_tensor", "all_gather_coalesced", "reduce_scatter",
        "reduce_scatter_tensor", "all_to_all_single", "all_to_all", "barriers", "objects", "forms_of_methods",
        "forms_that_do_not_exist",
        OBJECTS_OF_SAFE_TYPES, CHECKED_FOR_NAN,
    ],
)  # fmt: skip
def test_collective(same_over_gloo, program):
    same_over_gloo("programs_collectives", program)


@pytest.mark.parametrize(
    "program", ["send_and_receive", "tags", "from_any_source", "from_any_source_in_a_group",
                "batches", "by_group_rank", "in_groups", "outside_a_group", "subgroups", "groups_made_locally",
                "destroyed_in_any_order", "names", "sequence_numbers"],
)  # fmt: skip
def test_messages_and_groups(same_over_gloo, program):
    same_over_gloo("programs_peers", program)


@pytest.mark.parametrize(
    "program", ["stacked_outputs", "scaled_sums", "after_a_group_made_locally", "together_with_gloo",
                "callbacks_that_block", "callbacks_in_order", "callbacks_within_callbacks", "more_callbacks_than_threads",
                "callbacks_of_collected_futures",
                "callback_that_waits_for_a_later_one", "future_of_a_completed_work", "second_interface",
                "methods_of_the_group", "awaited"],
)  # fmt: skip
def test_operation_that_gloo_refuses(as_expected, program):
    as_expected("programs_beyond_gloo", program)


def test_blocking_call_runs_in_the_calling_thread(as_expected):
    as_expected("programs_threads", "stays_in_its_thread")
