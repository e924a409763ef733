"""Two hosts for tests: network namespaces without names, joined by a veth pair.

Each namespace lasts until a process in it reads the end of its standard input, at the latest when the test's process ends.
The link lasts as long as its namespaces. The machine's own addresses, links and rules stay unchanged.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

_TOOLS = ("unshare", "nsenter", "ip", "tc")
LINK = "link0"


class Hosts:
    """Two hosts, each a namespace with one end of a link."""

    interfaces = ("lo", LINK)

    def __init__(self, stack):
        self._stack = stack
        self.addresses = ["10.213.7.1", "10.213.7.2"]
        self._holders = [self._hold() for _ in self.addresses]
        self.namespaces = [f"/proc/{holder.pid}/ns/net" for holder in self._holders]
        self.on(0, f"ip link add {LINK} type veth peer name {LINK} netns {self._holders[1].pid}")
        for host, address in enumerate(self.addresses):
            self.on(host, "ip link set lo up")
            self.on(host, f"ip address add {address}/24 dev {LINK}")
            self.on(host, f"ip link set {LINK} up")

    def _hold(self):
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._stack.callback(self._end, holder)
        if holder.stdout.readline() != b"ready\n":
            pytest.skip(f"no network namespaces here: {holder.communicate()[1].decode().strip()}")
        return holder

    @staticmethod
    def _end(holder):
        holder.communicate()
        assert holder.returncode is not None

    def on(self, host, command):
        """Run a command on a host."""
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net", *command.split()],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"{command!r} is not possible here: {done.stderr.strip()}")

    def shape(self, rate):
        """Limit the link to a rate in each direction, such as ``1gbit``."""
        for host in range(len(self.addresses)):
            self.on(host, f"tc qdisc replace dev {LINK} root tbf rate {rate} burst 256kb latency 50ms")

    def sent_nbytes(self, host, interface=LINK):
        """Return the number of bytes that a host has sent over the link, or to itself (``"lo"``)."""
        counter = Path(f"/proc/{self._holders[host].pid}/net/dev").read_text()
        line = next(line for line in counter.splitlines() if line.strip().startswith(interface))
        return int(line.split(":")[1].split()[8])


@pytest.fixture
def hosts():
    """Two hosts, or the reason why the test is skipped."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} on this machine")
    with ExitStack() as stack:
        yield Hosts(stack)
