"""A server in a process of its own, ours or torch's: reads the token from stdin, prints its port, serves till killed.

Ours keeps what it holds in a folder, if it is told one.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

HOST = "127.0.0.1"


def run_store_server(whose: str, data: str | None = None) -> None:
    """Serve as ``asyncdist store`` does, or as torch's libuv TCPStore does, which wants no token."""
    token = sys.stdin.readline().strip()
    if whose == "torch":
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        server = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, use_libuv=True)
        _say(HOST, server.port)
        sys.stdin.read()
        return
    from asyncdist.base.background_loop import new_loop
    from asyncdist.config import Config
    from asyncdist.store.server.daemon import Options, serve

    options = Options(data=Path(data) if data is not None else None)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve(HOST, 0, token=token, config=Config(store_c10d="loopback"), ready=_say, options=options))


def _say(host: str, port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run_store_server(*sys.argv[1:])
