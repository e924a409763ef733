"""Observability of a running world: the flight recorder, its dumps and reports, hooks, metrics and spans.

The engine and groups record; `asyncdist trace` reports. Metrics and OpenTelemetry spans are hooks.
"""
