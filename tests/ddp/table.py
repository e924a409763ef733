"""Compares three contenders on the cases of program_table.py, and writes the table of docs/ddp-compared.md.

    python tests/ddp/table.py     # rewrites the tables of the installed torch: five minutes

The program runs all cases in worlds of 1 to 4 ranks, over shared memory and over TCP. test_table.py checks the same, and
that the page holds the table.
"""

import io
import os
import re
import runpy
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch

from benchmarks.processes import Nursery

PROGRAM = Path(__file__).parent / "program_table.py"
PAGE = Path(__file__).parents[2] / "docs" / "ddp-compared.md"
CONTENDERS = ("gloo", "backend", "asyncdist")
PRELOAD = ("asyncdist.sync", "asyncdist.ddp", "asyncdist_transports.shm", "torch.nn.parallel", "torch._dynamo",
           "torch.distributed.optim", "torch.distributed.algorithms.ddp_comm_hooks", "asyncdist.torch_backend",
           "asyncdist_transports.tcp", "torch.ao.quantization")  # fmt: skip
PATIENCE = 300.0
FIRST_TORCH = "2.13"
"""The version of torch whose table has all rows; that of a later one has the rows that differ."""
TRANSPORTS = {"shm,tcp": "shm", "tcp": "tcp"}
RUNS = [(world_size, transport) for transport in TRANSPORTS for world_size in (2, 1, 3, 4)]
"""The first run is that of the table of all cases."""
TOLERANCE = {
    "fp16_compress_hook": 2e-3,
    "fp16_compress_wrapper": 2e-3,
    "fp16_compress_wrapper_of_powerSGD": 2e-3,
    "built_in_hooks": 2e-3,
    "hooks_by_name": 2e-3,
    "bf16_compress_hook": 2e-2,
    "bf16_compress_wrapper": 2e-2,
}
"""The largest difference from gloo with more than two ranks, where it is above 1e-6: gloo rounds each sum of two ranks to
16 bits, asyncdist the sum of all ranks."""


def cases():
    """Return the names of the cases."""
    with warnings.catch_warnings(action="ignore"):  # torch's modules of hooks warn when they are imported
        return list(runpy.run_path(str(PROGRAM))["CASES"])


def outcomes(nursery, world_size, transport, names):
    """Return what each rank has recorded, or the text of its error, by case and contender."""
    found = {name: {} for name in names}
    before = os.environ.get("ASYNCDIST_TRANSPORT")
    for contender in CONTENDERS:
        with tempfile.TemporaryDirectory() as folder:
            where = f"file://{folder}/world"
            ranks = [
                nursery.start(PROGRAM, "run", contender, rank, world_size, where,
                              environment={"ASYNCDIST_TRANSPORT": transport})
                for rank in range(world_size)
            ]  # fmt: skip
            for rank in ranks:
                rank.say(names)
            for name in names:
                found[name][contender] = [loaded(rank.hear(PATIENCE)) for rank in ranks]
            assert [rank.wait(PATIENCE) for rank in ranks] == [0] * world_size
    assert os.environ.get("ASYNCDIST_TRANSPORT") == before
    return found


def loaded(outcome):
    """Return the records of a rank; the text of its error as it is."""
    return outcome if isinstance(outcome, str) else torch.load(io.BytesIO(outcome))


def differences(one, other, *, exact, tolerance=1e-6):
    """Return the first difference between what two contenders have recorded; empty if they are equal."""
    for rank, (records, others) in enumerate(zip(one, other, strict=True)):
        if len(records) != len(others):
            return f"rank {rank} has recorded {len(records)} and {len(others)} tensors"
        for place, ((name, *tensors), (other_name, *other_tensors)) in enumerate(zip(records, others, strict=True)):
            if name != other_name:
                return f"rank {rank}, record {place}: {name} and {other_name}"
            for tensor, found in zip(tensors, other_tensors, strict=True):
                if (tensor is None) != (found is None):
                    return f"rank {rank}, record {place}, {name}: {tensor} and {found}"
                if tensor is not None and not _equal(tensor, found, 0.0 if exact else tolerance):
                    return f"rank {rank}, record {place}, {name}: they differ by {(tensor - found).abs().max().item()}"
    return ""


def _equal(one, other, tolerance):
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance) if tolerance else torch.equal(one, other)


def cell(outcome, reference):
    """Return one cell of the table: whether the tensors equal those of the reference, or the error."""
    errors = {each for each in outcome if isinstance(each, str)}
    if errors:
        text = re.sub(r"0x[0-9a-f]+", "0x…", min(errors))
        return f"`{text.split(':')[0]}`: {shortened(text.split(': ', 1)[1])}"
    if reference is None or any(isinstance(each, str) for each in reference):
        return "works"
    found = differences(reference, outcome, exact=True)
    return "the same bits" if not found else f"other numbers ({found})"


def shortened(text):
    """Return at most 100 characters of a message, without characters that Markdown interprets."""
    text = text.replace("Got the following error when running the callback: ", "").replace("RuntimeError: ", "")
    text = text.replace("|", "/").replace("`", "'").replace("<", "(").replace(">", ")").replace("*", "")
    return text if len(text) <= 100 else text[:97] + "…"


def table(found):
    """Return the table in Markdown."""
    lines = [
        "| argument, method or hook | torch's over gloo | torch's over asyncdist | asyncdist's |",
        "|---|---|---|---|",
    ]
    for name, by in found.items():
        gloo = by["gloo"]
        row = [cell(gloo, None), cell(by["backend"], gloo), cell(by["asyncdist"], gloo)]
        lines.append(f"| `{name}` | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def write_into_page(name, made):
    """Replace what is between two comments of docs/ddp-compared.md by a table."""
    begin, end = f"<!-- begin of the table: {name} -->\n", f"<!-- end of the table: {name} -->\n"
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    PAGE.write_text(before + begin + "\n" + made + "\n" + end + rest.split(end)[1], encoding="utf-8")


def installed_torch():
    """Return the version of torch, such as 2.13."""
    return ".".join(torch.__version__.split(".")[:2])


def kind_of(name, reference, outcome):
    """Return in a few words how a contender's outcome of a case compares with gloo's."""
    if any(isinstance(each, str) for each in outcome):
        return "errors" if any(isinstance(each, str) for each in reference) else "errors where gloo works"
    if any(isinstance(each, str) for each in reference):
        return "work where gloo fails"
    if not differences(reference, outcome, exact=True):
        return "the same bits"
    tolerance = TOLERANCE.get(name, 1e-6)
    different = differences(reference, outcome, exact=False, tolerance=tolerance)
    return "other numbers" if different else f"within {tolerance:.0e}"


def summary(world_size, transport, found):
    """Return the row of one run: how many cases of each contender came out in which way."""
    cells = [str(world_size), TRANSPORTS[transport]]
    for contender in CONTENDERS[1:]:
        counts = Counter(kind_of(name, by["gloo"], by[contender]) for name, by in found.items())
        cells.append(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    return f"| {' | '.join(cells)} |\n"


def main():
    """Run all cases, and write the tables of this version of torch into the page, after each run those so far."""
    version = installed_torch()
    rows = "| ranks | transport | torch's over asyncdist | asyncdist's |\n|--:|---|---|---|\n"
    for world_size, transport in RUNS:
        with Nursery(PRELOAD) as nursery:
            found = outcomes(nursery, world_size, transport, cases())
        rows += summary(world_size, transport, found)
        print(rows.splitlines()[-1], flush=True)
        write_into_page(f"runs with torch {version}", rows)
        if (world_size, transport) == RUNS[0]:
            write_arguments(version, table(found))


def write_arguments(version, made):
    """Write the table of all cases, or its rows that differ from those of the first version of torch."""
    if version == FIRST_TORCH:
        write_into_page("arguments", made)
        return
    page = PAGE.read_text(encoding="utf-8").split("<!-- begin of the table: arguments, torch")[0]
    head, rule, *lines = made.splitlines()
    write_into_page(
        f"arguments, torch {version}", "\n".join([head, rule, *(each for each in lines if each not in page)]) + "\n"
    )


if __name__ == "__main__":
    main()
