"""Parts without torch that every other folder may use: deadlines, timers, threads, the process's end, addresses, TLS,
authentication. No torch."""
