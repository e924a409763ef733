"""CUDA tensors between ranks of one host, also on one device: each rank maps the others' memory (CUDA IPC).

driver        CUDA calls that torch does not offer: allocations, memory handles, interprocess events
handles       exported and imported memory
peer_memory   the memory that one rank shares with its peers, and its release
collectives   the collectives, each between two host barriers
p2p           the messages, each between two control messages
"""

from asyncdist_transports.cuda_ipc.collectives import CudaIpc

__all__ = ["CudaIpc"]
