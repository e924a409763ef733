"""``asyncdist bench`` and the benchmarks below it. Registered in `cli`.

collectives    ``asyncdist bench``: collectives and training steps against gloo, Open MPI and plain sockets
ddp            ``asyncdist bench ddp``: data-parallel training
faults         ``asyncdist bench faults``: failures
rpc            ``asyncdist bench rpc``: remote calls
store          ``asyncdist bench store``: the store
weights        ``asyncdist bench weights``: weights for readers
"""
