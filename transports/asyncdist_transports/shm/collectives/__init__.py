"""Collectives over mapped memory: slot tables, staging, streaming and zero-copy schedules.

`shm.transport` offers them to groups.
"""
