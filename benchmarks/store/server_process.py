"""A store server as a process, asyncdist's or torch's: ``server_process WHOSE [FOLDER]``.

WHOSE is "asyncdist" or "torch". The process reads the token from stdin, prints its port, and serves until stdin ends.
asyncdist's server keeps its data in FOLDER. `benchmark` starts the process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

HOST = "127.0.0.1"


def run_store_server(whose: str, data: str | None = None) -> None:
    """Serve as ``asyncdist store`` does, or as torch's libuv TCPStore does, which has no token."""
    token = sys.stdin.readline().strip()
    if whose == "torch":
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        server = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, use_libuv=True)
        _print_port(HOST, server.port)
        sys.stdin.read()
        return
    from asyncdist.base.background_loop import new_loop
    from asyncdist.config import Config
    from asyncdist.store.server.daemon import Options, serve

    threading.Thread(target=_exit_with_parent, daemon=True).start()
    options = Options(data=Path(data) if data is not None else None)
    config = Config(store_c10d="loopback")
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve(HOST, 0, token=token, config=config, ready=_print_port, options=options))


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def _print_port(host: str, port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run_store_server(*sys.argv[1:])
