"""Collective algorithms as generators, and what runs them. Read in this order:

`schedule`   the five words in which an algorithm speaks
`ring`       the shortest algorithm, and for large tensors the best one
`doubling`   fewest rounds: for small tensors, and the barrier
`tree`       from one to all and back
`pairwise`   everybody with everybody
`cost`       what an algorithm promises: rounds, messages, bytes
`choose`     which algorithm for which size
`hierarchy`  ranks on several hosts: islands that share memory, rails between them

All of these are pure: no I/O, no tensor, no clock. `asyncdist.testing.simulator` runs them over arrays, in lock step or
as adversarially as a seed will have it. What makes them operations on tensors:

`operation`  what a group asks for (a plan), and what becomes of it (an operation and its tasks)
`islands`    collectives over several hosts: partly in shared memory, partly along the rails
`plans`      from a call's arguments to a plan, for what is moved; `reductions` for what is reduced, `exchanges` for two
             ranks and for objects; `arguments` checks lists of tensors for all of them
`executor`   runs the schedules of pending operations over links
"""
