"""The parts of the reducer: its buckets, its hooks on gradients, and its record of one backward.

bucket_exchange     starts the all-reduces, or the hooks in their place, and waits for them
bucket_set          the buckets of all parameters, and their memory
bucket_tuning       finds the best bucket size in the first steps (pure)
faults              gradients that a rank lacks or got twice, and the error that all ranks raise for them
gradient_hooks      the hooks by which autograd tells the reducer of gradients
gradient_record     counts the gradients of one backward, and finds faults
graph               questions about tensors and nodes of autograd
optimizers          optimizers that torch attaches to parameters, to step in backward
step_times          times of one backward
"""
