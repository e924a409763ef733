"""The benchmark of remote calls: `python -m benchmarks rpc`."""
