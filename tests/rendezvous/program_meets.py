"""One rank of a real job: meet, swap process ids, write what came of it. ``python program_meets.py FOLDER [crash]``.

With ``crash``, rank 1 of the first generation ends with an error once all have met, and rank 0 waits to be killed.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from asyncdist.rendezvous import meet


async def main(folder, crash):
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    meeting = await meet(timeout=30)
    pids = [int(pid) for pid in await meeting.exchange(str(os.getpid()).encode())]
    outcome = {
        "rank": meeting.rank,
        "pids": pids,
        "pid": os.getpid(),
        "world_id": meeting.world_id,
        "token": meeting.token,
        "where": meeting.where,
        "listen_host": meeting.listen_host,
    }
    await asyncio.to_thread(Path(folder, f"{generation}-{meeting.rank}.json").write_text, json.dumps(outcome))
    if crash and generation == 0:
        if meeting.rank == 1:
            os._exit(3)
        await asyncio.Event().wait()
    await meeting.close()


asyncio.run(main(sys.argv[1], "crash" in sys.argv[2:]))
