"""What the two drivers of `asyncdist.engine.progress` wait with: a sleeping thread's poll, and an event loop."""
