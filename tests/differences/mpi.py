"""MPI as a contender, where a Python with mpi4py and an ``mpirun`` beside it or in PATH are found."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from dataclasses import replace
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from tests.differences import reference
from tests.differences.programs import OBJECTS, WORLD, Collectives, Step, given, shares_memory, splits
from tests.differences.reference import Verdict

_LIMIT = 20.0


def found(python: str | None) -> tuple[str, str] | None:
    """Return the Python and the mpirun to use; None if there are none. ``python`` is the one that has mpi4py."""
    python = python or sys.executable
    mpirun = shutil.which("mpirun", path=f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    has_mpi4py = subprocess.run([python, "-c", "import mpi4py"], capture_output=True, check=False).returncode == 0
    return (python, mpirun) if mpirun and has_mpi4py else None


class MpiContender:
    """The ranks of MPI. They get arrays, in the layout that MPI wants, and only collectives of the whole world."""

    name = "MPI"

    def __init__(self, python: str, mpirun: str) -> None:
        self._command = [
            mpirun,
            "--oversubscribe",
            "-n",
            str(WORLD),
            python,
            str(Path(__file__).parent / "program_mpi.py"),
        ]
        self._ranks: list[Connection] = []
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        key = secrets.token_bytes(16)
        environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        with Listener(("127.0.0.1", 0), backlog=WORLD, authkey=key) as listener:
            host, port = listener.address
            self._process = subprocess.Popen([*self._command, str(host), str(port), key.hex()], env=environment)
            arrived = [listener.accept() for _ in range(WORLD)]
        by_rank = {connection.recv(): connection for connection in arrived}
        self._ranks = [by_rank[rank] for rank in range(WORLD)]

    def close(self) -> None:
        """End the ranks."""
        for connection in self._ranks:
            connection.close()
        self._ranks = []
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
            self._process = None

    def run(self, program: Any) -> Verdict:
        """Run a program and judge its outcome."""
        if not isinstance(program, Collectives) or program.group != "all" or shares_memory(program):
            return reference.LEFT_OUT
        if any(step.call in OBJECTS or not _has_type(step) or step.op == "AVG" for step in program.steps):
            return reference.LEFT_OUT
        if not self._ranks:
            self._start()
        for rank, connection in enumerate(self._ranks):
            connection.send([_arrays(step, rank) for step in program.steps])
        outcomes = []
        for connection in self._ranks:
            if not connection.poll(_LIMIT):
                self.close()
                return Verdict("hung", "a rank did not answer")
            outcomes.append(connection.recv())
        verdict = reference.judge(program, outcomes, strict=False)
        if not reference.is_together(program, outcomes):
            self.close()
        return verdict


def _has_type(step: Step) -> bool:
    return step.call == "barrier" or not step.tensor.dtype.startswith(("bfloat", "float8", "float16"))


def _arrays(step: Step, rank: int) -> tuple[Any, ...]:
    """Return a step as program_mpi.py takes it: with the arrays that a rank contributes."""
    arrays, counts = [], None
    if step.call != "barrier":
        call = "reduce_scatter" if step.call == "reduce_scatter_tensor" else step.call
        arrays = [values.numpy() for _, values in given(replace(step, call=call), WORLD, rank, rank)]
    if step.call == "all_to_all_single":
        table = splits(step, WORLD)
        counts = table[rank].tolist(), table[:, rank].tolist()
    return step.call, step.op, step.root % WORLD, arrays, counts
