"""CUDA tensors between ranks with a device each, on one or several hosts, over NCCL by way of cupy.

bindings       unique ids, communicators, NCCL's numbers of dtypes and operations
communicator   life cycle of one rank's communicator
collectives    the collectives
p2p            the messages: one communicator for each pair of ranks that exchange messages
"""

from asyncdist_transports.nccl.collectives import Nccl

__all__ = ["Nccl"]
