"""Collective algorithms as generators without I/O, tensors or clocks, their costs, and the choice between them."""
