"""Registered memory of processes, which others read and write one-sidedly: below `Group.new_window` and torch's transports.

registration      tensors that peers may use, and the bytes by which they find and name them
memory_port       where a process serves its registered memory, and meets its peers
remote_port       the port of a peer: its memory, as this process reads and writes it
process_memory    the memory of another process, where the system lets this one trace it
"""
