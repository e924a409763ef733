"""Rank 0 of a larger world: prints its address, then waits for the other ranks. ``python program_leads.py``."""

import asyncio

from asyncdist.config import Config
from asyncdist.environment import Launch
from asyncdist.rendezvous import meet


async def main():
    meeting = await meet("tcp://127.0.0.1:0", rank=0, world_size=3, config=Config(), launch=Launch(), timeout=60)
    print(meeting.where, flush=True)
    await meeting.exchange(b"")


asyncio.run(main())
