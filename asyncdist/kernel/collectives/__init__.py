"""Plans of collectives: from the arguments of a call to schedules that the engine runs.

The algorithms are in `asyncdist.kernel.algorithms`. This folder applies them to tensors:

`collective_ops`  the collectives as methods of a group
`object_ops`      the operations on Python objects as methods of a group
`call_plan`       how all calls with tensors of the same dtypes and shapes run
`validation`      checks of the users' arguments
`reductions`      plans of reductions
`data_movement`   plans of collectives that move data
`sparse`          the plan of an all-reduce of sparse tensors
`p2p`             plans of point-to-point messages and of collectives on Python objects
`recorded`        the steps of small calls over links, which are made once
`hierarchical`    collectives over several hosts: shared memory inside each host, messages along the rails between them
`first_rail`      the small ones of these, in which one rank of each host exchanges for all
`node`            the part of both inside a host
"""
