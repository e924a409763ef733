"""Shared memory between the ranks of one host: whole collectives over mapped memory, and point-to-point messages.

`ShmTransport` is the entry point, registered in ``pyproject.toml``. A transport imports of `asyncdist` only the contract
(`asyncdist.kernel.transport`), `base`, `memory`, `algorithms.schedule`, `config` and `errors`. Read the modules in this
order:

`memory_order`     how a process reads data that another process has written
`control_block`    the words of a rank that its peers read: whether it sleeps, where its slot tables and rings are
`local_peer`       a peer on this host: its mapped memory, and the Unix socket for wake-ups, control messages and its end
`local_listener`   how two ranks connect: token, process identity, descriptors
`meetings`         how ranks meet at the start, and those of a crowded host later
`byte_ring`        messages between two ranks, as a byte stream through a ring buffer
`deferred_free`    memory that this rank has released and that peers may still read
`transport`        the transport of one rank
`collectives`      the collectives: `slot_table` (synchronisation), `staging` and `streaming` (pieces of large tensors),
                   `zero_copy` (registered tensors), `small_exchange` and `small` (small tensors), `native` (selection)
"""

from asyncdist_transports.shm.transport import ShmTransport

__all__ = ["ShmTransport"]
