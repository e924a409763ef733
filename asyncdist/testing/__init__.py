"""The public test kit, for authors of schedules, transports and programs.

`simulator` runs schedules over arrays, without links. `collective_cases` has every operation with its expected
result, and `conformance` tests the other guarantees of a transport. `arithmetic` computes the expected results of
reductions. `cluster` starts worlds of ranks in one process, and `processes` starts ranks as processes. `faults`
delays, blocks and cuts the network between ranks. `hosts` makes several hosts on one machine. `stopwatch` measures
time without time spent waiting for a processor. Import the module you need: the product imports none.
"""
