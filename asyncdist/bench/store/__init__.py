"""The store benchmark: server and client processes, measurements, and torch's wire format.

Called by `asyncdist.cli.bench_store`.
"""
