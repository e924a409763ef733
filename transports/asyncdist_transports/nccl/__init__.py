"""CUDA tensors between ranks with a device each, on one host or many: NCCL, through cupy.

bindings       NCCL by way of cupy: unique ids, communicators, numbers of dtypes and operations
communicator   life cycle of one rank's communicator
collectives    the collectives
p2p            the messages: one communicator per pair of ranks that exchange any
"""

from asyncdist_transports.nccl.collectives import Nccl

__all__ = ["Nccl"]
