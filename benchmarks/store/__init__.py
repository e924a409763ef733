"""The benchmark of the store: its measurements, and the processes of servers and clients."""
