"""A rank is killed while others wait for it with tensors on a device."""

import pytest
import torch

from asyncdist import sync
from asyncdist.errors import PeerLostError
from tests.support.devices import PretendStreams, device_group


def lose_a_peer(test, rank, size, meeting, transport, message):
    with sync.process_group(backend=transport, init_method=meeting, rank=rank, world_size=size, timeout=20) as group:
        on = device_group(group, (), PretendStreams())
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


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize("message", [False, True], ids=["all_reduce", "recv"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_survivor_names_the_killed_rank(transport, message, nursery, tmp_path):
    meeting = (tmp_path / "meeting").as_uri()
    ranks = [nursery.start(__file__, "lose_a_peer", rank, 3, meeting, transport, message) for rank in range(3)]
    assert [rank.hear() for rank in ranks] == ["met"] * 3
    ranks[1].kill()
    for survivor in (ranks[0], ranks[2]):
        peer, words = survivor.hear()
        assert peer == 1, words
        assert survivor.hear() == 1
        assert survivor.wait() == 0, survivor.output()
