"""A store with data that a test kills: started in a forked process, compacting all the time."""

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path

from asyncdist.config import Config
from asyncdist.store import StoreServer
from asyncdist.store.persistence import group_commit
from asyncdist.store.persistence.group_commit import Fsync


def serve(test: Connection, folder: str, compact_nbytes: int, fsync: Fsync) -> None:
    group_commit.INTERVAL = 0.01

    async def main() -> None:
        config = Config(store_compact_nbytes=compact_nbytes)
        server = await StoreServer.start("127.0.0.1", 0, config=config, data=Path(folder), fsync=fsync)
        test.send(server.port)
        await asyncio.Event().wait()

    asyncio.run(main())
