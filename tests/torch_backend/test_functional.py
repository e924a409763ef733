"""Functional and compiled collectives of torch, compared with the same over gloo."""

import shutil

import pytest

pytestmark = pytest.mark.processes
COMPILERS = ("c++", "g++", "clang++")
NEEDS_COMPILER = pytest.mark.skipif(
    not any(shutil.which(name) for name in COMPILERS),
    reason=f"inductor needs a C++ compiler: none of {COMPILERS} is here",
)


@pytest.mark.parametrize(
    "program", ["functional_reductions", "functional_exchanges", "differentiable_collectives",
                "operators_with_outputs", "batches_of_operators"],
)  # fmt: skip
def test_eager(same_over_gloo, program):
    same_over_gloo("programs_functional", program)


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", ["compiled_ahead_of_time", "compiled_around_calls"])
def test_compiled_ahead_of_time(same_over_gloo, program):
    same_over_gloo("programs_functional", program, patience=90.0)


@pytest.mark.exhaustive
@NEEDS_COMPILER
@pytest.mark.parametrize("program", ["compiled_by_inductor", "compiled_training"])
def test_compiled_by_inductor(same_over_gloo, world, program):
    same_over_gloo("programs_functional", program, close=world > 2, patience=90.0)
