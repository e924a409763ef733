"""What every folder may use: deadlines, timers, threads, descriptors, and the exit and fork of the process. No torch."""
