"""The parts of the reducer: its buckets, its hooks on gradients, and its record of one backward.

bucket_exchange     starts the all-reduces, or the hooks in their place, and waits for them
bucket_set          the buckets of all parameters, and their memory
faults              gradients that a rank lacks or got twice, and the error that all ranks raise for them
gradient_hooks      the hooks by which autograd tells the reducer of gradients, and optimizers that step in backward
gradient_record     counts the gradients of one backward, and finds faults
graph               questions about tensors and nodes of autograd
"""
