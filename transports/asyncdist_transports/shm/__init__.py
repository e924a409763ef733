"""Shared memory between the ranks of one host: whole collectives over mapped memory, and messages beside them.

Read in this order:

`order`        what makes it right that one process reads what another has written
`control`        what a rank shows its peers in its own memory: whether it sleeps, where its windows and rings are
`local_peer`    a peer on this host: its mapped memory, and the Unix socket that is doorbell, notice board and death notice
`meeting`      how two ranks become neighbours: token, process identity, descriptors
`window`       where a group's collectives meet: numbered slots with steps that only grow
`rounds`       staged data: pieces that stay in cache, copied in by one and out by the others
`direct`       registered tensors: read and written where they lie
`swap`         small all-reduces, the shortest way
`pieces`       how blocks go through an area
`collectives`  every collective in these terms
`ring`         messages between two ranks, as a stream through a ring
`limbo`        what we have left and others may still read
`transport`    the transport of one rank
"""

from asyncdist_transports.shm.transport import ShmTransport

__all__ = ["ShmTransport"]
