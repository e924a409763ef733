"""A rank with a window that does what the test says; forked by test_windows.py."""

import asyncio

import torch

import asyncdist


def keep(test, rank, meeting, is_mapped, count):
    asyncio.run(obey(test, rank, meeting, is_mapped, count))


async def obey(test, rank, meeting, is_mapped, count):
    await asyncdist.init_process_group(init_method=meeting, rank=rank, world_size=2)
    tensor = (asyncdist.empty(count, dtype=torch.uint8) if is_mapped else torch.empty(count, dtype=torch.uint8)).zero_()
    window = await asyncdist.group.WORLD.new_window(tensor)
    test.send("ready")
    # The loop of this program does not run while it waits for the test.
    while (order := test.recv())[0] != "end":
        if order[0] == "put":
            await window.put(torch.ones(order[1], dtype=torch.uint8), 1 - rank)
            test.send("done")
        elif order[0] == "sum":
            test.send(int(tensor.sum(dtype=torch.int64)))
        else:
            test.send(
                await asyncio.gather(until_lost(put_for_ever(window, rank)), until_lost(window.wait_signal(1 - rank)))
            )
    await window.tensor_deregister()
    await asyncdist.destroy_process_group()


async def put_for_ever(window, rank):
    source = torch.ones(1000, dtype=torch.uint8)
    while True:
        await window.put(source, 1 - rank)
        # The rest of the rank learns of the silence of its peer only while this loop is free.
        await asyncio.sleep(0.01)


async def until_lost(call):
    """Return the class and the text of the error that ends a call."""
    try:
        await call
    except Exception as error:
        return type(error).__name__, str(error)
