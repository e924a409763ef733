"""The public test kit, for authors of schedules, transports and programs.

`simulator` runs schedules over arrays, without links. `collective_cases` has every operation with its expected
outcome, and `conformance` what else every transport must pass. `arithmetic` computes the expected results of
reductions. `cluster` starts worlds of ranks in one process, `processes` starts ranks as processes. `faults` delays,
blocks and cuts the network between ranks. Import the module you need; the product itself does not import this package.
"""
