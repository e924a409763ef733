"""The transports that come with asyncdist. Each is found through the entry-point group ``asyncdist.transports``."""
