"""The two drivers of `asyncdist.kernel.engine.progress`, inline and on an event loop, and how they wait."""
