"""CUDA tensors between ranks that have a device each, on one host or many: NCCL, through cupy.

bindings       NCCL by way of cupy: unique ids, communicators, numbers for types and operations
communicator   one rank's communicator: made, used and ended
memory         memory as its calls take it
backend       the collectives
courier        the messages: a communicator for each two ranks that have any
"""

from asyncdist_transports.nccl.collectives import Nccl

__all__ = ["Nccl"]
