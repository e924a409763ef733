"""Processes that talk: addresses, the proof of the job's token, TLS, admission, heartbeats, and channels. Nothing here
imports torch.

`connection` holds channels: authenticated connections between processes that need not be in a common group. They find
each other in the store of the job (`asyncdist.rendezvous.directory`), and send each other messages: a *head* of up to
32 KiB, any number of *buffers*, and, on one host, file descriptors. Messages arrive complete, once and in the order in
which they were sent, or the channel ends with `PeerLostError`. Long messages are cut into parts, between which short ones
pass. On one host they pass through shared memory; between hosts over TCP, inside TLS if the settings ask for it.

    handler = Handler()                                     # its methods are those of `ChannelHandler`
    directory = await JobDirectory.open("asyncdist://host:29500/job", "weights", config=config)
    port = ChannelPort(handler, host=directory.host, service="weights", job=directory.job,
                       token=directory.token, config=config, label="publisher")
    await directory.publish(PeerRecord("model", port.address, {"version": 3}))    # a key with a lease

    # elsewhere
    for record in await directory.records("model"):         # or: async with directory.watch("model") as changes
        channel = await port.connect(record.address)        # one channel per process; it serves both directions
        channel.send(b"head")                               # leaves at the end of this turn of the loop
        await channel.deliver(b"head", [memoryview(...)])   # returns when the memory may change

    await port.close()                                      # in order: the peers are told
    await directory.close()

What a user of channels takes care of:

- **Back-pressure.** `PeerChannel.send` never waits. Ask `is_congested`, await `drain`, or use `deliver`. Bound what a peer
  may ask for: the sender of a long message keeps its memory until it is `done`, and each peer may open many.
- **Memory.** `ChannelHandler.opened` may set ``message.buffers`` to the memory into which a long message is received.
- **The end.** `ChannelHandler.closed` is called once per channel: within a moment of the peer's death, and within
  ASYNCDIST_HEARTBEAT after it has stopped. A channel that has ended stays so; `ChannelPort.connect` opens another one. The
  id of a port (`ChannelAddress.id`) is never used twice.
- **Descriptors.** ``channel.send(head, descriptors=[memfd])`` passes memory to a peer for which `PeerChannel.is_local`
  holds.

All objects belong to the loop on which they were made.
"""

from asyncdist.net.acceptor import Acceptor
from asyncdist.net.admission import EvictingQueue
from asyncdist.net.connection.channel import ChannelHandler, PeerChannel
from asyncdist.net.connection.frames import SHORT_NBYTES
from asyncdist.net.connection.handshake import ChannelAddress, Greeting
from asyncdist.net.connection.messages import IncomingMessage, OutgoingMessage
from asyncdist.net.connection.port import ChannelPort
from asyncdist.net.listening import ACCEPT_AGAIN, listen_tcp
from asyncdist.net.loop_socket import LoopSocket
from asyncdist.net.security.handshake import Security, accept, dial_tcp
from asyncdist.net.security.tls import rank_contexts

__all__ = [
    "ACCEPT_AGAIN", "SHORT_NBYTES", "Acceptor", "ChannelAddress", "ChannelHandler", "ChannelPort", "EvictingQueue",
    "Greeting", "IncomingMessage", "LoopSocket", "OutgoingMessage", "PeerChannel", "Security", "accept", "dial_tcp",
    "listen_tcp", "rank_contexts",
]  # fmt: skip
