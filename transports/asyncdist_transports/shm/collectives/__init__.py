"""Collectives over mapped memory: slot tables, staging, streaming and zero-copy schedules."""
