"""Tests that the seeds of the fuzzers, and the inputs that once crashed a parser, are handled. `make fuzz` fuzzes."""

import runpy
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULE = runpy.run_path(str(HERE / "targets.py"))
CASES = [(name, seed) for name, seeds in MODULE["SEEDS"].items() for seed in seeds]
CASES += [(path.parent.name, path.read_bytes()) for path in sorted((HERE / "seeds").glob("*/*"))]


@pytest.mark.parametrize(("name", "data"), CASES, ids=[f"{name}-{place}" for place, (name, _) in enumerate(CASES)])
def test_parser_raises_only_protocol_errors(name, data):
    target = MODULE["TARGETS"][name]
    target(data)
    for end in range(len(data)):
        target(data[:end])
        target(data[:end] + bytes([data[end] ^ 0x80]) + data[end + 1 :])
