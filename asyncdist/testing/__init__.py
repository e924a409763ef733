"""The public test kit, for those who write a schedule, a transport, or a program on top.

`simulator` runs schedules over arrays, without links; `drills` has every operation with its outcome, and `promises` what
else every transport must pass; `arithmetic` is what is expected of reductions; `cluster` starts worlds of ranks in one
process, `processes` ranks of their own; `faults` cuts, delays and clogs what lies between them. Import the module you
need.
"""
