"""The benchmark behind ``asyncdist bench``: asyncdist, gloo, Open MPI and plain sockets in the same processes and run.

Reading order: `plan` says what to measure. `programs` starts processes; `launch` uses it to start the ranks, and collects
their results. `rank` is the main function of a rank process. `workloads.collectives` defines the collectives, `contenders`
execute them, and `measure` times the contenders in turns. `pace` and `pacing_sockets` make all ranks start a call together.
`workloads.training` times training steps. `result` holds the figures, and `report` shows them.
The repository has further benchmarks in `benchmarks`.

The modules that the command line imports before it measures do not import torch.
"""
