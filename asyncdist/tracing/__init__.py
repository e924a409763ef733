"""Observability of a running world: the flight recorder, its dumps and reports, and profiler spans.

The engine and groups record; `asyncdist trace` reports.
"""
