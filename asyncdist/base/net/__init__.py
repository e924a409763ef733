"""What all listening sockets of a process share: which connection gives way when there are too many, and what is logged."""
