"""Tensors on an accelerator: how a group carries them, and what it needs to know of the device.

An operation on a device is not over when the call returns: it stands in a queue of the device, a *stream*. What must come
after it is ordered behind it on the device, and the host goes on. So here things happen in this order:

    the caller's thread     checks the arguments, notes where the caller's stream is, and hands the call to the `Line`
    the line                does one call after the other, in the order of the calls: on a stream of the group's own
                            that first waits for what was noted; its last step is a event
    ``work.wait()``         has the caller's current stream wait for the event. The host waits only for the event to be
                            there: until the line has come to the call, and the peers have made it too where ranks
                            look into one another's memory
    ``await work``          resumes when the device has passed the event

streams     what is asked of a device: streams, events, pinned memory (CUDA's, by way of torch)
work        the handle of an operation on a device
line        who does the calls, in order
watch       who notices that they are over, or will not be
rollcall    what ranks tell one another when one lasts
backend    what a way between devices offers: the contract of `asyncdist_transports.cuda_ipc` and ``nccl``
choice      which of them a group takes: found out from what every rank says of itself
staged      the way that is always there: through pinned memory of the host, and on by the host's transports
courier     what a way offers for messages between two ranks, and how these speak about each on the host
messages    who sends and receives: by the best way that both can go
group       the same ranks as a `Group`, for tensors on one device
"""
