"""Fixtures of the tests of the benchmarks."""

from tests.cli.bench.conftest import unknown_machine as unknown_machine
