"""A rank on a pretended device that tells how far it is, and loses a peer."""

import torch

from asyncdist import sync
from asyncdist.errors import PeerLostError
from tests.support.devices import PretendStreams, device_group


def lose_a_peer(test, rank, size, meeting, transport, message):
    with sync.process_group(backend=transport, init_method=meeting, rank=rank, world_size=size, timeout=20) as group:
        streams = PretendStreams()
        on = device_group(group, (), streams)
        on.all_reduce(torch.ones(4)).synchronize()
        test.send("met")
        if rank == 1:
            test.recv()  # until it is killed
        try:
            (on.recv(torch.ones(100_000), 1) if message else on.all_reduce(torch.ones(4))).synchronize()
        except PeerLostError as error:
            test.send((error.peer, str(error)))
        try:
            on.barrier().wait()
        except PeerLostError as error:
            test.send(error.peer)
        on.close()
