"""Compares three contenders on the cases of program_table.py, and writes the table of docs/ddp.md.

    python tests/ddp/table.py     # rewrites the table

test_table.py checks worlds of 1 to 4 ranks over shared memory and TCP, and that the page holds the table.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
from pathlib import Path

import torch

from asyncdist.testing.processes import Nursery

PROGRAM = Path(__file__).parent / "program_table.py"
PAGE = Path(__file__).parents[2] / "docs" / "ddp.md"
CONTENDERS = ("gloo", "backend", "asyncdist")
PRELOAD = ("asyncdist.sync", "asyncdist.ddp", "asyncdist_transports.shm", "torch.nn.parallel", "torch._dynamo",
           "torch.distributed.optim", "torch.distributed.algorithms.ddp_comm_hooks", "asyncdist.torch_backend",
           "asyncdist_transports.tcp", "torch.ao.quantization")  # fmt: skip
PATIENCE = 300.0


def cases() -> list[str]:
    """Return the names of the cases."""
    import runpy

    return list(runpy.run_path(str(PROGRAM))["CASES"])


def outcomes(nursery: Nursery, world_size: int, transport: str, names: list[str]) -> dict[str, dict[str, list]]:
    """Return what each rank has recorded, or the text of its error, by case and contender."""
    found: dict[str, dict[str, list]] = {name: {} for name in names}
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


def loaded(outcome: bytes | str) -> list | str:
    """Return the records of a rank; the text of its error as it is."""
    return outcome if isinstance(outcome, str) else torch.load(io.BytesIO(outcome))


def differences(one: list, other: list, *, exact: bool, tolerance: float = 1e-6) -> str:
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


def _equal(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance) if tolerance else torch.equal(one, other)


def cell(outcome: list, reference: list | None) -> str:
    """Return one cell of the table: whether the tensors equal those of the reference, or the error."""
    errors = {each for each in outcome if isinstance(each, str)}
    if errors:
        text = re.sub(r"0x[0-9a-f]+", "0x…", min(errors))
        return f"`{text.split(':')[0]}`: {shortened(text.split(': ', 1)[1])}"
    if reference is None or any(isinstance(each, str) for each in reference):
        return "works"
    found = differences(reference, outcome, exact=True)
    return "the same bits" if not found else f"other numbers ({found})"


def shortened(text: str) -> str:
    """Return at most 100 characters of a message, without characters that Markdown interprets."""
    text = text.replace("Got the following error when running the callback: ", "").replace("RuntimeError: ", "")
    text = text.replace("|", "/").replace("`", "'").replace("<", "(").replace(">", ")").replace("*", "")
    return text if len(text) <= 100 else text[:97] + "…"


def table(found: dict[str, dict[str, list]]) -> str:
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


def write_into_page(name: str, made: str) -> None:
    """Replace what is between two comments of docs/ddp.md by a table."""
    begin, end = f"<!-- begin of the table: {name} -->\n", f"<!-- end of the table: {name} -->\n"
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    PAGE.write_text(before + begin + "\n" + made + "\n" + end + rest.split(end)[1], encoding="utf-8")


def main() -> None:
    """Write the table of two ranks over shared memory into the page."""
    with Nursery(PRELOAD) as nursery:
        made = table(outcomes(nursery, 2, "shm,tcp", cases()))
    write_into_page("arguments", made)


if __name__ == "__main__":
    main()
