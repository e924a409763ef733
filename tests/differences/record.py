"""Measures the rows of docs/differences.md with the torch that is installed, and writes the page.

Run it by ``python tests/differences/record.py``, once with each version of torch. The words of each row are kept in
docs/differences.json, for each version.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.processes import Nursery  # noqa: E402
from tests.differences.hunt import MODULES, Contender  # noqa: E402
from tests.differences.rows import ROWS  # noqa: E402

RECORDS = ROOT / "docs" / "differences.json"
PAGE = ROOT / "docs" / "differences.md"
VERSION = torch.__version__.split("+")[0]

_HEAD = """# Results that differ from gloo's, torch's and MPI's

Where a program gets another result from asyncdist than from what it used before, on CPUs. `tests/differences/rows` has
a program for each row; a test runs each on both sides, and `tests/differences/record.py` writes this page. It was recorded
with torch {versions}. `make differences` looks for more with programs at random. The scripts in the folder
`findings` of the repository show some of it without asyncdist; calls that one side lacks are on the pages about moving
from [gloo](moving-from-gloo.md) and [MPI](moving-from-mpi.md).
"""
_NOTES = {
    "Collectives over gloo": """A tensor of which several elements share memory, such as an expanded one, is refused with
`UsageError` where a collective would write it. AVG is a sum in float32 or float64, divided: it is infinite where that sum
is. A call that asyncdist refuses on one rank alone is not counted: let that error end the process, or abort the
group, and the other ranks get an error too.

Sums of narrow floats are rounded as torch converts to them. For float8_e4m3fn, torch turns inf and all that is above the
largest value into 448, and for float8_e8m0fnu it drops the sign; the package `ml_dtypes` gives NaN for both, so checkpoints
and messages that it has converted differ. (`findings/float8-of-torch-and-ml-dtypes-differ-above-the-largest-value.sh`)
""",
    "Data-parallel training": """[The table of arguments and hooks](ddp-compared.md) compares torch's class over gloo,
torch's over asyncdist, and asyncdist's class.
""",
    "DTensor": """`item()` of a pending sum calls no collective, over any back end: use `full_tensor().item()`.
""",
}
_CLOSING = """## MPI and Ray

No test runs these programs, because MPI and Ray are no dependencies of the tests. The scripts named here do, in `findings`:

| input | the other | asyncdist |
|---|---|---|
| an MPI_Allreduce with MAX over values of which one is NaN | ranks disagree with MPICH 5.0, and the halves of one array \
differ with MPICH and Open MPI 5.0 (`mpi-allreduce-of-nan-differs-between-ranks.sh`) | NaN on all ranks |
| sums of 8- and 16-bit integers that overflow, on a processor with AVX2 | Open MPI 5.0 saturates 64 of 70 elements and \
wraps 6 around; MPICH 5.0 wraps all (`openmpi-saturates-small-integers-by-their-place.sh`) | \
all wrap around, as torch's additions do |
| a sum of torch's bfloat16 by mpi4py | Open MPI 5.0 adds the bytes: 1.5 + 1.5 is 8.5e37; MPICH 5.0 refuses it; both \
send it (`mpi4py-sums-bfloat16-as-bytes.sh`) | the sum |
| one rank has an error for its own arguments, and goes on with its next call | the other ranks take the next call for \
this one (`mpi-lets-an-error-of-one-rank-shift-the-calls-of-the-others.sh`) | the same |
| a tensor of Ray's direct transport in a list, or for a task that is no actor | `NotImplementedError`; \
`AttributeError` (`ray-direct-transport-takes-references-as-arguments-of-actors-only.sh`) | \
[remote calls](rpc.md) carry tensors anywhere in their arguments |
"""
_OTHERS = {
    "Collectives over gloo": "gloo",
    "DTensor": "over gloo",
    "Stores": "torch's stores",
    "Data-parallel training": "torch's class",
}


@contextmanager
def sides() -> Iterator[tuple[Any, Any]]:
    """Start the ranks of gloo and of asyncdist."""
    with tempfile.TemporaryDirectory() as folder, Nursery(MODULES) as nursery:
        yield (
            Contender("gloo", nursery, Path(folder), "gloo"),
            Contender("asyncdist", nursery, Path(folder), "asyncdist"),
        )


def page(records: dict[str, dict[str, dict[str, str]]]) -> str:
    """Return the page: a table for each area."""
    versions = sorted({version for record in records.values() for version in record["other"]})
    parts = [_HEAD.format(versions=" and ".join(versions))]
    for area in dict.fromkeys(row.area for row in ROWS.values()):
        parts.append(f"## {area}\n")
        lines = [f"| input | {_OTHERS.get(area, 'torch')} | asyncdist |", "|---|---|---|"]
        for row in (each for each in ROWS.values() if each.area == area):
            other, ours = (_merged(records[row.name][side]) for side in ("other", "ours"))
            lines.append(f"| {row.given} | {other} | {ours} |")
        parts.append("\n".join(lines) + "\n")
        if area in _NOTES:
            parts.append(_NOTES[area])
    return "\n".join([*parts, _CLOSING])


def _merged(words: dict[str, str]) -> str:
    """Return the words of all versions of torch, once if they are the same."""
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return "; ".join(f"torch {version}: {each}" for version, each in sorted(words.items()))


def main() -> None:
    """Record this version, and write the page."""
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    records = {name: records.get(name, {"other": {}, "ours": {}}) for name in ROWS}
    with sides() as (other, ours):
        for name, record in records.items():
            record["other"][VERSION], record["ours"][VERSION] = other.words(name), ours.words(name)
            print(f"{name}: {record['other'][VERSION]} | {record['ours'][VERSION]}", flush=True)
    RECORDS.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(records))


if __name__ == "__main__":
    main()
