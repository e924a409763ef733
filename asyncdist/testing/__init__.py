"""The public test kit, for those who write a schedule, a transport, or a program on top.

`simulator` runs schedules over arrays, without links; `conformance` is what every transport must pass; `cluster` starts
worlds of ranks; `faults` cuts, delays and clogs what lies between them. Import the module you need.
"""
