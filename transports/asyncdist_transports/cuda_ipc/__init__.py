"""CUDA tensors between processes of one host, also on one device: each maps the others' memory (CUDA IPC).

driver        CUDA calls that torch does not offer: allocations, memory handles, interprocess events
handles       exported and imported memory, interprocess events
peer_memory   the memory that one process shares with its peers, and its release
collectives   the collectives, each between two host barriers
p2p           the messages, each between two control messages
loans         tensors that a process in no common group reads where they lie
"""

from asyncdist_transports.cuda_ipc.collectives import CudaIpc

__all__ = ["CudaIpc"]
