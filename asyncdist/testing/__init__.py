"""The public test kit, for authors of transports and programs.

`collective_cases` has every operation with its expected result, and `conformance` tests the other guarantees of a
transport. `arithmetic` computes the expected results of reductions. `cluster` starts worlds of ranks in one process, and
`hosts` makes several hosts on one machine. Import the module you need.
"""
