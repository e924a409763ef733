"""Collective algorithms as generators without I/O, tensors or clocks, their costs, and the choice between them.

`collectives` runs them through the engine; imports `base` alone.
"""
