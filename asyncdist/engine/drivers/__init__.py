"""The means by which the two drivers of `asyncdist.engine.progress` wait: a sleeping thread's poll, and an event loop."""
