"""The benchmark behind ``asyncdist bench``: asyncdist, gloo, Open MPI and plain sockets in the same processes and run.

Reading order: `plan` says what to measure. `launch` starts the ranks, and collects their results. `rank` is the main
function of a rank process. `traffic` defines the collectives, `contenders` execute them, and `measure` times the contenders
in turns; `pacing` makes all ranks start a call together. `result` holds the figures, which `tables` and `plot` show.
The repository has further benchmarks in `benchmarks`.

The modules that the command line imports before it measures do not import torch.
"""
