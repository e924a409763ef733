"""Plans of collectives: from the arguments of a call to schedules that the engine runs. `asyncdist.groups` calls them.

The algorithms are in `asyncdist.algorithms`: pure generators without I/O, tensors or clocks.
`asyncdist.testing.simulator` runs them over arrays, in lock step or in adversarial orders. This folder applies them to
tensors:

`operations`     the collectives as methods of a group
`validation`     checks the arguments of users
`reductions`     plans of reductions
`data_movement`  plans of collectives that move data
`sparse`         the plan of an all-reduce of sparse tensors
`p2p`            plans of point-to-point messages and of collectives on Python objects
`hierarchical`   collectives over several hosts: shared memory inside each host, messages along the rails between them
"""
