"""A member of a job, which a test paces, kills and replaces."""

import asyncio

import torch

import asyncdist as dist


def member(test, job, min_size, start_size):
    """Train until the test has sent something to any member, and report each generation."""
    torch.set_num_threads(1)
    asyncio.run(_train(test, job, min_size, start_size))


async def _train(test, job, min_size, start_size):
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = dist.State(model=model, optimizer=optimizer)
    async with dist.join(job, min_size=min_size, start_size=start_size, state=state, timeout=60.0) as session:
        test.send(("joins", session.id))
        async for group in session.generations():
            received = await group.adopt(state)
            test.send(("generation", group.size(), received, state.step))
            own, last = 0, torch.zeros(1)
            while not last and not group.changed:
                async with group.step() as step:
                    torch.manual_seed(state.step)
                    optimizer.zero_grad()
                    model(torch.randn(8, 300)).sum().backward()
                    works = [group.all_reduce(each.grad, dist.ReduceOp.AVG) for each in model.parameters()]
                    last.fill_(test.poll())
                    await asyncio.gather(*works, group.all_reduce(last, dist.ReduceOp.MAX))
                last *= step.committed
                if step.committed:
                    optimizer.step()
                    state.step += 1
                    own += 1
                    if own == 5:
                        test.send(("step", state.step))
    test.send(("done", state.step, [each.detach().double().sum().item() for each in model.parameters()]))
