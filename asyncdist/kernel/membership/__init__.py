"""The state machine of membership, without I/O, clocks, threads and tensors.

`agreement` lets the members of a group decide once who goes on. `engine` gives it time and messages, and
`asyncdist.net.detector` tells it which peers are lost.
"""
