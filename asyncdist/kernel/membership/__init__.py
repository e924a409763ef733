"""The state machines of membership, without I/O, clocks, threads and tensors.

`detector` decides which peers are suspected and which are lost. `agreement` lets the members of a group decide once who
goes on. `engine` gives them time and messages.
"""
