"""The benchmarks of the repository, each a command: ``python -m benchmarks store`` in a checkout of the sources.

ddp        data-parallel training against stock PyTorch and against training without communication
devices    collectives and messages on CUDA tensors
faults     how soon ranks know of a failure, and go on
idle       what idle ranks keep
rpc        remote calls against torch's RPC and Ray
store      the store against torch's TCPStore
weights    how fast published weights reach their readers

All have one form. `grid` has the cases, contenders and samples of a run, its JSON and its tables; `benchmark` makes the
command from a plan; `laboratory` starts the processes, which `processes` forks (tests use it). The
`benchmark` in each folder says its plan, its cases and the columns of its page; other modules say what its processes do.
``asyncdist bench``, in the package, measures collectives.
"""
