"""One-sided transfers for ``torch.distributed._transport``, which torch 2.15 and later have.

memory         tensors that peers may read and write, views of them, and their descriptors
memory_port    the channels over which processes map, read and write each other's memory
transport      the transport, which torch finds by its entry point
"""
