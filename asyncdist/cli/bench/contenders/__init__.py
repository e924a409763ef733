"""The contenders of a benchmark: asyncdist, gloo, Open MPI, plain sockets and a memory copy. Used by `bench.rank`."""
