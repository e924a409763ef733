"""What `torch.nn.parallel.DistributedDataParallel` accepts and has, for `module`.

arguments   which arguments are accepted, and what they mean
hooks       hooks that torch's class takes by private methods
names       further methods and attributes, and how a model takes part in torch's context `Join`
"""
