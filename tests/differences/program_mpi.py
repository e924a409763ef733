"""One rank of MPI: runs the steps that the hunt sends with mpi4py on arrays. It needs neither torch nor asyncdist.

A step is a tuple (call, reduction, root, arrays, counts); its outcome is the results, or the error as (class, text).
"""

import sys
from multiprocessing.connection import Client

import numpy as np
from mpi4py import MPI

OPS = {"SUM": MPI.SUM, "PRODUCT": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX,
       "BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}  # fmt: skip


def run(world, call, op, root, arrays, counts):
    """Run a step; return its results."""
    rank, size = world.Get_rank(), world.Get_size()
    first = arrays[0] if arrays else None
    match call:
        case "barrier":
            world.Barrier()
            return []
        case "all_reduce":
            world.Allreduce(MPI.IN_PLACE, first, OPS[op])
            return [first]
        case "reduce":
            into = np.empty_like(first)
            world.Reduce(first, into, OPS[op], root)
            return [into if rank == root else first]
        case "broadcast":
            world.Bcast(first, root)
            return [first]
        case "all_gather" | "all_gather_into_tensor" | "gather":
            into = np.empty((size, *first.shape), first.dtype)
            if call == "gather":
                world.Gather(first, into, root)
                return list(into) if rank == root else []
            world.Allgather(first, into)
            return list(into) if call == "all_gather" else [into.reshape(-1, *first.shape[1:])]
        case "reduce_scatter" | "reduce_scatter_tensor":
            into = np.empty_like(first)
            world.Reduce_scatter_block(np.stack(arrays), into, OPS[op])
            return [into]
        case "scatter":
            into = np.empty_like(first)
            world.Scatter(np.stack(arrays), into, root)
            return [into]
        case "all_to_all":
            into = np.empty((size, *first.shape), first.dtype)
            world.Alltoall(np.stack(arrays), into)
            return list(into)
        case "all_to_all_single":
            sent, received = counts
            width = int(np.prod(first.shape[1:]))
            into = np.empty((sum(received), *first.shape[1:]), first.dtype)
            world.Alltoallv([first, [n * width for n in sent]], [into, [n * width for n in received]])
            return [into]
        case "ring":
            into = np.empty_like(first)
            world.Sendrecv(first, (rank + 1) % size, recvbuf=into, source=(rank - 1) % size)
            return [into]
    raise NotImplementedError(call)


def main():
    """Run programs until the hunt closes the connection."""
    host, port, key = sys.argv[1:]
    world = MPI.COMM_WORLD
    world.Set_errhandler(MPI.ERRORS_RETURN)
    with Client((host, int(port)), authkey=bytes.fromhex(key)) as hunt:
        hunt.send(world.Get_rank())
        while True:
            try:
                steps = hunt.recv()
            except EOFError:
                break
            outcomes = []
            for step in steps:
                try:
                    results = run(world, *step)
                    outcomes.append(
                        (
                            "returned",
                            [(each.dtype.name, each.shape, np.ascontiguousarray(each).tobytes()) for each in results],
                            [],
                        )
                    )
                except Exception as error:
                    outcomes.append(("raised", type(error).__name__, str(error)[:300], False))
            hunt.send(outcomes)


main()
