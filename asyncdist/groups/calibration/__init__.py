"""Gives all ranks of a world one model of the links between hosts, by which they select the schedules of collectives.

`measurement` measures the links when the ranks have met. `profile` combines the results of all hosts, and reads and writes
the file that replaces the measurement.
"""
