"""Collectives and point-to-point operations on accelerator tensors.

The device group (`group.DeviceGroup`) is created by `asyncdist.Group` for the first tensor on a device. This layer may
import the engine, the collectives and the transport contracts, but not `asyncdist.groups`.

A device operation is asynchronous: the call enqueues work on a *stream* and returns. The steps of one call are:

    calling thread      validates the arguments, records an event in the caller's stream, submits the call to an executor
    executor thread     runs the calls in issue order on the group's own stream, which first waits for that event;
                        its last step records the completion event
    ``work.wait()``     makes the caller's current stream wait for the completion event. The host waits only until the
                        operation is enqueued: its executor has reached it, and the peers have issued it too where a
                        backend reads peer memory
    ``await work``      resumes after the device has passed the completion event

Modules:

work                 the handle of a device operation
completion_watcher   the thread that polls completion events, timeouts and device failures
desync_detector      cross-rank check of operations that take long
negotiate            agreement of all ranks on one backend
p2p                  send and receive, over the best backend that both ranks support
cpu_group            the CPU group of a device group, and lazily created ones for control traffic
cuda_streams         streams, events and pinned memory of a CUDA device
small_copies         copies of a few KiB to a CUDA device by its copy engine
lending              tensors that processes in no common group read where they lie
group                the device group

The backend contract is in `asyncdist.kernel.transport.device_collectives`, `device_p2p`, `device_loans` and
`device_streams`; the implementations are `asyncdist_transports.cuda_ipc`, ``nccl`` and ``staged``.
"""
