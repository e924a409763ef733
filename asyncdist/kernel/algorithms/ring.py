"""Ring algorithms: each rank sends one of P blocks to its right neighbour and receives one from its left.

The tensor is cut into P blocks. A block that travels once around the ring, and is added to at every rank, arrives complete
(`reduce_scatter`). A complete block that travels once more reaches all ranks (`all_gather`). No algorithm moves fewer
bytes, and all of them go between neighbours. The number of rounds grows with P.

Three ranks, blocks a b c, and the ranks that have been added to them; each line follows one round:

                    rank 0            rank 1            rank 2
                    a0   b0   c0      a1   b1   c1      a2   b2   c2
    reduce_scatter  a0   b02  c0      a1   b1   c01     a12  b2   c2
                    a012 b02  c0      a1   b012 c01     a12  b2   c012
    all_gather      a012 b02  c012    a012 b012 c01     a12  b012 c012
                    a012 b012 c012    a012 b012 c012    a012 b012 c012

Source: Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
Comput. 69 (2009). Each block is reduced along one path and then copied, so all ranks get identical bits.
"""

from __future__ import annotations

from asyncdist.kernel.algorithms.schedule import Blocks, Recv, Reduce, Schedule, Send


def reduce_scatter(rank: int, size: int, blocks: Blocks) -> Schedule:
    """Leave in ``blocks[rank]`` its reduction over all ranks; the other blocks hold partial results.

    Costs P-1 rounds, in each of which a rank sends, receives and reduces 1/P of the tensor.
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    for passed in range(1, size):
        yield Send(right, blocks[(rank - passed) % size]), Reduce(left, blocks[(rank - passed - 1) % size])


def all_gather(rank: int, size: int, blocks: Blocks) -> Schedule:
    """Copy each rank's ``blocks[rank]`` to all ranks.

    Costs P-1 rounds, in each of which a rank sends and receives 1/P of the tensor.
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    for passed in range(size - 1):
        yield Send(right, blocks[(rank - passed) % size]), Recv(left, blocks[(rank - passed - 1) % size])


def all_reduce(rank: int, size: int, blocks: Blocks) -> Schedule:
    """Leave in all blocks of all ranks their reduction.

    Costs 2(P-1) rounds; a rank sends and receives 2(P-1)/P of the tensor and reduces (P-1)/P of it.
    """
    yield from reduce_scatter(rank, size, blocks)
    yield from all_gather(rank, size, blocks)
