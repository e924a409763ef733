"""What `torch.nn.parallel.DistributedDataParallel` accepts and has, for `module`.

arguments   which arguments are accepted, and what they mean
names       further methods, attributes and hooks, and how a model takes part in torch's context `Join`
"""
