"""The benchmark of data-parallel training: steps on one host and between two, memory, and training with few exchanges.

plan        what to measure (no torch)
result      the figures of a run (no torch)
benchmark   starts the ranks and collects their figures
ranks       the functions of the rank processes
models      the models and their batches
"""
