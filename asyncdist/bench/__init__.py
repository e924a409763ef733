"""The benchmark behind ``asyncdist bench``: ours beside gloo, Open MPI and plain sockets, in the same processes and run.

Read in this order: `plan` (what to measure), `traffic` (a collective with its tensors and the check of its result),
`raw`, `mpi` and `contenders` (who moves them), `sockets` and `pace` (how ranks start together), `measure` (rounds),
`training`, `rank` (what a rank process does), `launch` and `processes` (who starts them); then `result`, `table`, `plot`,
`machine`.

Nothing that the command line imports before it measures imports torch.
"""
