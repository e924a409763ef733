"""Shared by all listening sockets of a process: which connection gives way when there are too many, and what is logged."""
