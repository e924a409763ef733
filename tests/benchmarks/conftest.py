"""Fixtures of the tests of the benchmarks."""

from tests.bench.conftest import unknown_machine as unknown_machine
