"""The benchmark of remote calls: `asyncdist bench rpc`."""
