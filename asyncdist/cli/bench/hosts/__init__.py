"""Runs between hosts: `placement` starts ranks on the hosts of a test bed, `limits` says what limits a collective there.

`sweep` runs a plan with fewer hosts too. `asyncdist.cli.bench.report.hosts_table` shows the results.
"""
