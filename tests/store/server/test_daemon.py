"""The daemon in a process of its own: it ends without warnings on a signal. `tests/cli` tests the command."""

import signal
import subprocess
import sys

import pytest

from asyncdist.config import Config
from asyncdist.errors import StoreConnectionError
from asyncdist.store import TCPStore

LONG = 60.0
CONFIG = Config(token="a token for tests", store_reconnect=0.0)
PROGRAM = """
import asyncio
from asyncdist.config import Config
from asyncdist.store.server.daemon import serve

async def main():
    asyncio.get_running_loop().slow_callback_duration = 60  # a busy machine causes no warning
    await serve("127.0.0.1", 0, token="a token for tests", config=Config(), ready=lambda _, port: print(port, flush=True))

asyncio.run(main())
print("closed", flush=True)
"""


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_daemon_ends_without_warnings_on_a_signal(number):
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            with TCPStore("127.0.0.1", int(process.stdout.readline()), timeout=LONG, config=CONFIG) as store:
                assert store.add("n", 1) == 1
                process.send_signal(number)
                out, err = process.communicate(timeout=LONG)
                assert (process.returncode, out, err) == (0, b"closed\n", b"")
                with pytest.raises(StoreConnectionError):
                    store.add("n", 1)
        finally:
            process.kill()
