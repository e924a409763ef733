"""Run by test_diloco_survivors.py: a member whose exchanges overlap with its inner steps, while another one is killed."""

import torch
from torch import nn

import asyncdist.sync as dist


def member(test, rank, where, transport, compress):
    """Report each outer step; after the order to end, send the members and the sums of the outer parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    with (
        dist.process_group(transport, init_method=where, rank=rank, world_size=3, timeout=30) as group,
        dist.DiLoCo(model, inner, every=4, fragments=2, delay=1, compress=compress, group=group) as diloco,
    ):
        seen, last = 0, None
        while last is None or diloco.inner_steps < last:
            inputs = torch.randn(4, 300, generator=generator)
            inner.zero_grad()
            model(inputs).square().mean().backward()
            diloco.step()
            if diloco.outer_steps > seen:
                seen = diloco.outer_steps
                test.send((diloco.group.member_ids, diloco.inner_steps))
                # The test paces the members: they stop at the same inner step.
                last = test.recv()
        diloco.synchronize()
        sums = [parameter.detach().double().sum().item() for parameter in model.parameters()]
        test.send((diloco.group.member_ids, sums))
