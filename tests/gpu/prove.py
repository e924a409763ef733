"""Run the GPU tests, the benchmark and whole programs unattended, in limited time. `make prove-gpu` runs it.

It writes report.json and report.txt into a folder, and each part's output into a log in the same folder. Both reports are
written again after every part, so they exist even if the machine is lost. Parts run in the order of their importance.
After a part that fails or exceeds its limit the next one runs. The reports name the parts for which no time was left. The
exit status is 0 if every part has passed.

The runner imports only the standard library and needs Linux. ``--device cpu`` runs the same programs on CPU tensors, to
check the runner itself where there is no GPU.
"""

import argparse
import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
MARK = "PROVE_GPU_PART"
"""Environment variable by which the runner finds all processes of a part, also those in sessions of their own."""
GRACE = 5.0
"""Seconds in which an interrupted part may print what it has found."""
LEAST = 10.0
"""Seconds that must be left for a part to be started."""
NEWS = 20.0
"""Seconds between two lines of progress."""
EXCERPT, ERRORS = 25, 10
"""The last lines of a failed part's log, and lines with errors before them, in the text report."""

Figures = Callable[[Path, str], dict[str, Any]]


def no_figures(folder: Path, log: str) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Part:
    """A command with its limit in seconds. ``figures(folder, log)`` returns results for the reports.

    A figure "problem" makes the part fail although its command has succeeded.
    """

    name: str
    command: Sequence[str]
    limit: float
    figures: Figures = no_figures


@dataclass
class Outcome:
    """What became of a part. ``outcome`` is "passed", "failed", "cut off" or "not run"."""

    name: str
    outcome: str
    command: str
    seconds: float = 0.0
    status: int | None = None
    why: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


# -- figures of the parts -----------------------------------------------------------------------------


def json_line(folder: Path, log: str) -> dict[str, Any]:
    """Return the last line of JSON in a log."""
    lines = [line for line in log.splitlines() if line.startswith("{") and line.endswith("}")]
    return json.loads(lines[-1]) if lines else {}


def test_figures(folder: Path, log: str) -> dict[str, Any]:
    """Return the numbers of tests by outcome, the failed tests, and why others were skipped."""
    summary = next((line for line in reversed(log.splitlines()) if re.search(r"\d+ \w+.* in [\d.]+s", line)), "")
    found: dict[str, Any] = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)", summary)}
    found["not_passed"] = re.findall(r"(?m)^(?:FAILED|ERROR) (\S+)", log)
    found["skipped_because"] = sorted(set(re.findall(r"(?m)^SKIPPED \[\d+\] \S+ (.+)$", log)))
    return found


def gpu_test_figures(folder: Path, log: str) -> dict[str, Any]:
    """Return the same, and a problem if every test was skipped."""
    found = test_figures(folder, log)
    return found if found.get("passed") else {**found, "problem": "no test has passed"}


def matches(**patterns: str) -> Figures:
    """Return a function that finds the first group of each pattern in a log; a number if it is one."""

    def figures(folder: Path, log: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, pattern in patterns.items():
            if match := re.search(pattern, log):
                text = match[1].replace(",", "")
                with contextlib.suppress(ValueError):
                    text = float(text)
                found[name] = text
        return found

    return figures


def weight_sync_figures(folder: Path, log: str) -> dict[str, Any]:
    """Return what the example prints, and the median of its broadcasts."""
    broadcasts = [float(each) for each in re.findall(r"│ +\d+ │ +([\d.]+) ms", log)]
    printed = matches(
        parameters=r"([\d.]+ MiB) of parameters",
        requests=r"([\d,]+) requests answered",
        longest_pause_in_broadcasts_ms=r"loop: ([\d.]+) ms during",
        last_parameters=r"last parameters (.*) the trainer's",
    )
    return {"median_broadcast_ms": statistics.median(broadcasts) if broadcasts else None, **printed(folder, log)}


def bench_figures(name: str) -> Figures:
    """Return a function that takes the results from the file that the benchmark has written."""

    def figures(folder: Path, log: str) -> dict[str, Any]:
        paths = sorted((folder / name).glob("*.json"))
        if not paths:
            return {}
        results = json.loads(paths[0].read_text())
        rows = [{"collective": c["part"], **c["facts"], "contenders": c["medians"]} for c in results["cases"]]
        return {"machine": results["machine"], "rows": rows} if rows else {"problem": "nothing was measured"}

    return figures


# -- the parts ----------------------------------------------------------------------------------------

FACTS = """
import json, platform, subprocess
from importlib.metadata import PackageNotFoundError, version
def versions(*names):
    for name in names:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            pass
import torch
facts = {"python": platform.python_version(), "cuda": torch.version.cuda,
         **dict(versions("torch", "numpy", "cupy-cuda13x", "cupy-cuda12x", "uvloop"))}
if torch.cuda.is_available():
    facts["devices"] = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.total,memory.used", "--format=csv,noheader"]
    try:
        facts["driver, memory, used"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        pass
import asyncdist
print(json.dumps(facts), flush=True)
import asyncdist.cli
asyncdist.cli.main(["info"])
"""


def parts_for(device: str, folder: Path) -> list[Part]:
    """Return the parts in the order of their importance; on the CPU they are small, and have no limits of their own."""
    python, on_gpu = sys.executable, device == "cuda"
    launch = [python, "-m", "torch.distributed.run", "--standalone"]

    def tests(name: str) -> Part:
        options = ["-v", "-rfEs", "--tb=short", "--durations=10", "-o", "faulthandler_timeout=90"]
        if on_gpu and find_spec("xdist") is not None:
            options += ["-n", str(max(1, min(8, (os.cpu_count() or 1) // 2))), "--dist", "worksteal"]
        command = [python, "-m", "pytest", *options, "-c", "tests/gpu/pytest.ini", "tests/gpu"]
        # On the CPU every test is skipped.
        return Part(name, command, 190, gpu_test_figures if on_gpu else test_figures)

    def bench(name: str, limit: float, ranks: int, sizes: str, *collectives: str) -> Part:
        how = ["--sizes", sizes] if on_gpu else ["--sizes", "4K,64K", "--repeat", "3"]
        command = [python, "-m", "benchmarks", "devices", *collectives, "--device", device, "--ranks", str(ranks), *how]
        return Part(name, [*command, "--output", str(folder / name)], limit, bench_figures(name))

    def program(name: str, ranks: int, path: str, *options: str, figures: Figures) -> Part:
        command = [*launch, f"--nproc-per-node={ranks}", path, "--device", device, *options]
        return Part(name, command, 90, figures)

    digits = matches(
        accuracy=r"test accuracy ([\d.]+)", largest_difference=r"single process: (\S+)", run=r"(\d ranks?, .*)"
    )
    small = () if on_gpu else ("--steps", "4", "--width", "64")
    served = ("--width", "5000") if on_gpu else ("--versions", "6", "--steps", "40", "--width", "400", "--lr", "0.02")
    called = () if on_gpu else ("--sizes", "131072", "1048576", "--rounds", "3")
    out = ("--out", str(folder / "train_digits.png")), ("--out", str(folder / "weight_sync.png"))
    parts = [
        Part("facts", [python, "-c", FACTS], 60, json_line),
        tests("tests"),
        bench("bench-2", 90, 2, "4K,64K,1M,25M,100M", "all_reduce", "broadcast", "send"),
        program("stock-torch", 2, "tests/gpu/stock_torch.py", *small, figures=json_line),
        program("train-digits", 2, "examples/train_digits.py", *out[0], figures=digits),
        program("weight-sync", 3, "examples/weight_sync.py", *served, *out[1], figures=weight_sync_figures),
        program("remote-calls", 2, "tests/gpu/remote_calls.py", *called, figures=json_line),
        bench("bench-2-large", 50, 2, "1G", "broadcast"),
        bench("bench-1", 50, 1, "4K,1M,100M", "all_reduce", "broadcast"),
        bench("bench-4", 70, 4, "4K,1M,100M", "all_reduce", "broadcast"),
        tests("tests-again"),
    ]
    return parts if on_gpu else [replace(part, limit=math.inf) for part in parts]


# -- targets ------------------------------------------------------------------------------------------


def _measured(outcomes: Sequence[Outcome], ranks: int, collective: str, nbytes: int) -> dict[str, Any]:
    """Return a row of the benchmark on CUDA devices; empty if there is none."""
    for outcome in outcomes:
        for row in outcome.figures.get("rows", ()):
            if row["device"] != "cpu" and (row["ranks"], row["collective"], row["nbytes"]) == (
                ranks,
                collective,
                nbytes,
            ):
                return dict(row)
    return {}


def targets_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Compare the benchmark's figures with the targets. "met" is None if a figure was not measured."""
    reduced, small = (_measured(outcomes, 2, "all_reduce", nbytes) for nbytes in (100 << 20, 4 << 10))
    sent, alone = _measured(outcomes, 2, "broadcast", 1 << 30), _measured(outcomes, 1, "all_reduce", 4 << 10)

    def of(row: dict[str, Any], contender: str) -> float:
        """Return the seconds of a contender until the data is there; NaN if it was not measured."""
        return float(row.get("contenders", {}).get(contender, {}).get("figure", math.nan))

    ours = of(reduced, "cuda_ipc")
    tick = sent.get("latest_ticks", {}).get("awaited", math.nan)
    at_least, at_most = True, False
    rows: list[tuple[str, float, bool, float, str]] = [
        ("all_reduce, 100 MiB, cuda_ipc", of(reduced, "gloo") / ours, at_least, 50, "× gloo"),
        ("all_reduce, 100 MiB, cuda_ipc", 100 * of(reduced, "copy") / ours, at_least, 25, "% of one process"),
        ("all_reduce, 4 KiB, cuda_ipc", 1e6 * of(small, "cuda_ipc"), at_most, 150, "µs until the data is there"),
        ("broadcast, 1 GiB, cuda_ipc", (1 << 30) / 1e9 / of(sent, "cuda_ipc"), at_least, 1000, "GB/s"),
        ("broadcast, 1 GiB, awaited", 1e6 * tick, at_most, 5000, "µs latest tick"),
        (
            "all_reduce, 4 KiB, 1 rank, nccl",
            1e6 * (of(alone, "nccl") - of(alone, "torch's nccl")),
            at_most,
            10,
            "µs above torch's NCCL",
        ),
    ]
    return [
        {
            "what": what,
            "found": None if math.isnan(found) else found,
            "wanted": f"{'at least' if least else 'at most'} {limit} {unit}",
            "met": None if math.isnan(found) else (found >= limit if least else found <= limit),
        }
        for what, found, least, limit, unit in rows
    ]


# -- running ------------------------------------------------------------------------------------------


def environment_of(mark: str) -> dict[str, str]:
    paths = [str(CHECKOUT), str(CHECKOUT / "transports"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "150",
        "OMP_NUM_THREADS": "1",
        MARK: mark,
    }


def kill_all(mark: str) -> int:
    """Kill every process of a part, and return how many there were."""
    killed = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
                killed += 1
    return killed


def run_part(part: Part, limit: float, folder: Path, say: Callable[[str], None]) -> Outcome:
    """Run one part for at most ``limit`` seconds. None of its processes remains."""
    log = folder / f"{part.name}.log"
    mark = f"{os.getpid()}-{part.name}"
    started = time.monotonic()
    result = Outcome(part.name, "failed", " ".join("…" if "\n" in word else word for word in part.command))
    status: int | None = None
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                part.command, cwd=CHECKOUT, env=environment_of(mark), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        while status is None and (left := limit - (time.monotonic() - started)) > 0:
            try:
                status = process.wait(min(left, NEWS))
            except subprocess.TimeoutExpired:
                say(f"  {part.name}, {time.monotonic() - started:.0f} s: {last_line(log)}")
        if status is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
    finally:
        remaining = kill_all(mark)
    process.wait()
    result.seconds = round(time.monotonic() - started, 1)
    result.status = status
    text = log.read_text(errors="replace")
    try:
        result.figures = part.figures(folder, text)
    except (ValueError, KeyError) as cause:
        result.figures = {"problem": f"its results cannot be read: {cause!r}"}
    problem = result.figures.pop("problem", "")
    if status is None:
        result.outcome, result.why = "cut off", f"not done after {limit:.0f} s; {last_line(log)}"
    elif status != 0:
        result.why = f"exit status {status}"
    elif problem or remaining:
        result.why = problem or f"it left {remaining} processes behind"
    else:
        result.outcome = "passed"
    return result


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:120] if lines else "no output"


def prove(parts: Sequence[Part], folder: Path, total: float, say: Callable[[str], None] = print) -> int:
    """Run the parts within ``total`` seconds, write the reports after each, and return the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for number, part in enumerate(parts, 1):
        left = total - (time.monotonic() - started) - GRACE
        if left < LEAST:
            why = f"no time was left of {total:.0f} s"
            outcomes.append(Outcome(part.name, "not run", " ".join(part.command), why=why))
        else:
            limit = min(part.limit, left)
            say(f"[{number}/{len(parts)}] {part.name}, at most {limit:.0f} s")
            outcomes.append(run_part(part, limit, folder, say))
        last = outcomes[-1]
        say(f"[{number}/{len(parts)}] {part.name}: {last.outcome}, {last.seconds:.1f} s{last.why and ', ' + last.why}")
        write_reports(folder, outcomes, parts, time.monotonic() - started)
    say((folder / "report.txt").read_text())
    return 0 if all(each.outcome == "passed" for each in outcomes) else 1


# -- reports ------------------------------------------------------------------------------------------


def write_reports(folder: Path, outcomes: Sequence[Outcome], parts: Sequence[Part], seconds: float) -> None:
    targets = targets_of(outcomes)
    passed = sum(each.outcome == "passed" for each in outcomes)
    facts = next((each.figures for each in outcomes if each.name == "facts"), {})
    state = "passed" if passed == len(parts) else "running" if len(outcomes) < len(parts) else "failed"
    report = {
        "outcome": state,
        "seconds": round(seconds, 1),
        "facts": facts,
        "parts": [asdict(each) for each in outcomes],
        "pending": [part.name for part in parts[len(outcomes) :]],
        "targets": targets,
    }
    texts = (json.dumps(report, indent=1), text_report(folder, report, outcomes, len(parts)))
    for path, text in zip((folder / "report.json", folder / "report.txt"), texts, strict=True):
        new = path.with_suffix(".new")
        new.write_text(text + "\n")
        new.replace(path)


def text_report(folder: Path, report: dict[str, Any], outcomes: Sequence[Outcome], count: int) -> str:
    passed = sum(each.outcome == "passed" for each in outcomes)
    lines = [f"{report['outcome'].upper()}: {passed} of {count} parts passed, after {report['seconds']:.0f} s", ""]
    lines += [f"{name}: {', '.join(v) if isinstance(v, list) else v}" for name, v in report["facts"].items()]
    lines += ["", f"{'part':<16}{'outcome':<10}{'seconds':>8}  figures"]
    for each in outcomes:
        shown = {name: value for name, value in each.figures.items() if not isinstance(value, list)}
        figures = "" if each.name == "facts" or "rows" in each.figures else json.dumps(shown, ensure_ascii=False)
        lines.append(f"{each.name:<16}{each.outcome:<10}{each.seconds:>8.1f}  {each.why or figures}".rstrip())
    lines += ["", "targets"]
    for target in report["targets"]:
        met = {True: "met", False: "MISSED", None: "not measured"}[target["met"]]
        found = "" if target["found"] is None else f": {target['found']:.4g}"
        lines.append(f"  {met:<14}{target['what']}, {target['wanted']}{found}")
    for each in outcomes:
        lines += benchmark_lines(each)
        lines += [f"  {each.name}, skipped: {reason}" for reason in each.figures.get("skipped_because", ())]
        if each.outcome in ("failed", "cut off"):
            lines += ["", f"{each.name} {each.outcome}: {each.why}; {each.name}.log ends with"]
            lines += [f"  not passed: {name}" for name in each.figures.get("not_passed", ())]
            log = (folder / f"{each.name}.log").read_text(errors="replace").splitlines()
            lines += [f"  | {line}" for line in excerpt_of(log)]
    return "\n".join(lines)


def excerpt_of(log: Sequence[str]) -> list[str]:
    """Return the last lines of a log, after the first errors before them: torchrun prints much after a rank's error."""
    before, last = log[:-EXCERPT], log[-EXCERPT:]
    errors = [line for line in before if re.search(r"Error\b|error:", line)][:ERRORS]
    return [*errors, *(["…"] if errors else []), *last]


def benchmark_lines(outcome: Outcome) -> list[str]:
    """Return a line for each contender at each size: the median until the data is there, in microseconds."""
    lines = []
    for row in outcome.figures.get("rows", ()):
        times = ", ".join(f"{name} {1e6 * one['figure']:.1f}" for name, one in row["contenders"].items())
        lines.append(f"  {row['collective']}, {row['nbytes']:,} bytes, {row['ranks']} ranks, µs: {times}")
        lines += [f"    {name} is not measured: {reason}" for name, reason in row.get("absent", {}).items()]
    return ["", outcome.name, *lines] if lines else []


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=Path("out/prove-gpu"), help="folder of the reports and logs")
    arguments.add_argument("--seconds", type=float, default=520, help="limit of the whole run; 520 by default")
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: check the runner itself")
    arguments.add_argument("--only", action="append", default=[], metavar="PART", help="run this part; repeatable")
    options = arguments.parse_args()
    folder = options.out.resolve()
    parts = parts_for(options.device, folder)
    if unknown := sorted(set(options.only) - {part.name for part in parts}):
        arguments.error(f"no part is called {unknown[0]}; there are {', '.join(part.name for part in parts)}")
    # A shell starts background commands with SIGINT ignored, and programs inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    chosen = [part for part in parts if not options.only or part.name in options.only]
    return prove(chosen, folder, options.seconds, lambda text: print(text, flush=True))


if __name__ == "__main__":
    sys.exit(main())
