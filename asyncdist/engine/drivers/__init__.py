"""The two drivers of `asyncdist.engine.progress`, an inline one and an event loop, and the means by which they wait."""
