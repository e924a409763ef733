"""CUDA tensors between ranks of one host, also of one device: each maps the others' memory.

driver      what is asked of CUDA beside torch: allocations, handles, events that cross
handles     whose allocation is mapped where
backend    the collectives, between two meetings on the host
courier     the messages, each between two control_group on the host
leaving     how mapped memory is let go of
"""

from asyncdist_transports.cuda_ipc.collectives import CudaIpc

__all__ = ["CudaIpc"]
