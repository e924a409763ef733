"""The benchmarks of the repository, each a command: ``python -m benchmarks store`` in a checkout of the sources.

ddp        data-parallel training against stock PyTorch and against training without communication
faults     how soon ranks know of a failure, and go on
rpc        remote calls against torch's RPC and Ray
store      the store against torch's TCPStore
weights    how fast published weights reach their readers

In each folder `command` is the command line, `benchmark` starts the processes and collects their figures, and `table` shows
these. `publication` is what the commands share. ``asyncdist bench`` measures collectives, and is in the package.
"""
