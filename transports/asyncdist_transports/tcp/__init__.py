"""Messages over TCP: non-blocking sockets, read straight into the posted memory and written straight out of the sender's.

A connection carries one way: who opens it writes messages, who accepted it reads them, so that two ranks which first
speak at the same moment have nothing to agree on. The way back carries only notices (abort, goodbye), and by its end
tells the writer that the reader is gone. ``lanes`` connections make one link; a message's part chooses its lane.
"""

from asyncdist_transports.tcp.transport import TcpTransport

__all__ = ["TcpTransport"]
