"""Messages over TCP: non-blocking sockets that read into the posted memory and write from the sender's memory.

The engine calls it through `asyncdist.kernel.transport.base`. A connection carries data one way: the dialing side sends,
the accepting side receives, so two ranks that first send to each other at the same moment have nothing to negotiate. The
way back carries only control messages (abort, goodbye), and its end tells the sender that the receiver is gone.
``lanes`` connections make one link; a message's part selects its lane.
"""

from asyncdist_transports.tcp.transport import TcpTransport

__all__ = ["TcpTransport"]
