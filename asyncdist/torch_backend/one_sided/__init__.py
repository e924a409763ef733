"""One-sided transfers by torch's names.

memory       registered memory as torch's transports see it: views and descriptors
transport    the transport of ``torch.distributed._transport``, which torch 2.15 finds by its entry point
window       the window of ``torch.distributed._new_window``, which torch 2.15 has, and of `ProcessGroup.new_window`
"""
