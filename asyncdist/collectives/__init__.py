"""Collective algorithms as generators, and what runs them. Read in this order:

`schedule`   the five words in which an algorithm speaks
`ring`       the shortest algorithm, and for large tensors the best one
`doubling`   fewest rounds: for small tensors, and the barrier
`tree`       from one to all and back
`pairwise`   everybody with everybody
`cost`       what an algorithm promises: rounds, messages, bytes
`choose`     which algorithm for which size

All of these are pure: no I/O, no tensor, no clock. Drivers (`executor`) run them over links;
`asyncdist.testing.simulator` runs them over arrays, in lock step or as adversarially as a seed will have it.
"""
