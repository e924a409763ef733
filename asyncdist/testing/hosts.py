"""Several hosts on one machine: Linux network namespaces whose links meet in a switch.

    with Hosts(2) as hosts:
        hosts.shape("1gbit")                                  # both links, in both directions
        where = f"tcp://{hosts.addresses[0]}:29500"
        ranks = [
            subprocess.Popen(hosts.command(host, sys.executable, "train.py", where, str(rank)), env=hosts.environment(host))
            for rank, host in enumerate([0, 0, 1, 1])
        ]
        hosts.on(1, f"ip link set {LINK} down")               # the network of host 1 fails

The namespaces have no names. Each lasts until a process in it reads the end of its standard input, at the latest when the
process that made it ends. The machine's own addresses, links and rules stay unchanged. Making hosts needs Linux, the
programs of `PROGRAMS`, and root or the capability to create namespaces.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from asyncdist.errors import UnsupportedError

LINK = "link0"
"""The interface of a host that leads to the others."""
DEAD_LINK = "dead0"
"""The interface of a host that leads nowhere, where there is one."""
PROGRAMS = ("unshare", "nsenter", "ip", "tc")
"""The programs that must be installed: Debian's packages util-linux and iproute2 have them."""

_SWITCH = "switch0"
_RETRY_MS = 20
"""Milliseconds after which a host asks again for the hardware address of another one."""
_NEW_NETWORK = 0x40000000


class HostsUnavailableError(UnsupportedError):
    """This machine cannot make or change such hosts. The message has the command that failed and its output."""


class Hosts:
    """Hosts with one link each, which meet in a switch. A context manager that removes them.

    Args:
        count: The number of hosts, 1 to 200.
        ipv6: Give the hosts IPv6 addresses only.
        mtu: The largest packet of each host's link in bytes: one number for all, or numbers by host.
        dead_links: The hosts that also have an interface with an address that leads nowhere.

    Attributes:
        addresses: The address of each host.
        namespaces: The file of each host's namespace, for `enter`.
        interfaces: The interfaces of each host that carry data.

    Raises:
        HostsUnavailableError: A program is missing, or this process may not create namespaces.
    """

    interfaces = ("lo", LINK)

    def __init__(
        self, count: int = 2, *, ipv6: bool = False, mtu: int | Mapping[int, int] = 1500, dead_links: Sequence[int] = ()
    ) -> None:
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            raise HostsUnavailableError(f"no {' and no '.join(missing)} on this machine")
        self.addresses = [f"fd00:213:7::{host + 1:x}" if ipv6 else f"10.213.7.{host + 1}" for host in range(count)]
        self._prefix = 64 if ipv6 else 24
        with ExitStack() as stack:
            self._switch = self._hold(stack)
            self._run(self._switch, f"ip link add {_SWITCH} type bridge")
            self._run(self._switch, f"ip link set {_SWITCH} up")
            self._holders = [self._hold(stack) for _ in range(count)]
            for host in range(count):
                self._connect(host, mtu if isinstance(mtu, int) else mtu.get(host, 1500))
            for host in dead_links:
                self._run(self._holders[host], f"ip link add {DEAD_LINK} type veth peer name nowhere0")
                self._run(self._holders[host], "ip link set nowhere0 up")
                address = f"fd00:213:99::{host + 1:x}" if ipv6 else f"10.213.99.{host + 1}"
                self._assign(host, DEAD_LINK, address)
            self._stack = stack.pop_all()
        self.namespaces = [f"/proc/{holder.pid}/ns/net" for holder in self._holders]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hosts. Processes that still run in a host keep its namespace, without its link."""
        self._stack.close()

    # -- using a host ----------------------------------------------------------------------------

    def command(self, host: int, *command: str) -> list[str]:
        """Return the command that runs a program on a host."""
        return ["nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net", *command]

    def environment(self, host: int) -> dict[str, str]:
        """Return this process's variables for a program on a host, with which its ranks know their host by name.

        Processes of different hosts would otherwise find out that they can share memory.
        """
        return {**os.environ, "ASYNCDIST_HOST": f"host{host}"}

    def on(self, host: int, command: str) -> None:
        """Run a command, such as ``ip`` or ``tc``, on a host.

        Raises:
            HostsUnavailableError: The command fails.
        """
        self._run(self._holders[host], command)

    def sent_nbytes(self, host: int, interface: str = LINK) -> int:
        """Return the number of bytes that a host has sent over its link, or to itself (``"lo"``)."""
        return sent_nbytes(interface, str(self._holders[host].pid))

    # -- faults and limits -----------------------------------------------------------------------

    def shape(self, rate: str, *hosts: int) -> None:
        """Limit what hosts, by default all, send and receive to a rate in the words of ``tc``, such as ``1gbit``."""
        shaper = f"root tbf rate {rate} burst 256kb latency 50ms"
        for host in hosts or range(len(self.addresses)):
            self.on(host, f"tc qdisc replace dev {LINK} {shaper}")
            self._run(self._switch, f"tc qdisc replace dev {self._port(host)} {shaper}")

    def cut(self, host: int) -> None:
        """Take the link of a host down."""
        self.on(host, f"ip link set {LINK} down")

    def drop(self, host: int) -> None:
        """Drop all packets that a host sends, and none that it receives. `restore` and `shape` undo it."""
        self.on(host, f"tc qdisc replace dev {LINK} root blackhole")

    def restore(self, host: int) -> None:
        """Undo `cut`, `drop` and `shape` for a host."""
        self.on(host, f"ip link set {LINK} up")
        for holder, interface in ((self._holders[host], LINK), (self._switch, self._port(host))):
            self._run(holder, f"tc qdisc replace dev {interface} root pfifo limit 1000")

    # -- making ----------------------------------------------------------------------------------

    @staticmethod
    def _hold(stack: ExitStack) -> subprocess.Popen[bytes]:
        """Make a namespace, and return the process that holds it."""
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        stack.callback(holder.communicate)
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            raise HostsUnavailableError(f"no network namespaces here: {holder.communicate()[1].decode().strip()}")
        return holder

    def _connect(self, host: int, mtu: int) -> None:
        holder, port = self._holders[host], self._port(host)
        self._run(holder, f"ip link add {LINK} type veth peer name {port} netns {self._switch.pid}")
        self._run(self._switch, f"ip link set {port} master {_SWITCH}")
        self._run(self._switch, f"ip link set {port} up")
        self._run(holder, "ip link set lo up")
        self._run(holder, f"ip link set {LINK} mtu {mtu}")
        self._assign(host, LINK, self.addresses[host])
        # The first packet after the link has come back may be lost, and the next attempt would come after a second.
        table = "ndisc_cache" if ":" in self.addresses[host] else "arp_cache"
        self._run(holder, f"ip ntable change name {table} dev {LINK} retrans {_RETRY_MS}")

    def _assign(self, host: int, interface: str, address: str) -> None:
        # Without detection of duplicates an IPv6 address can be used at once.
        options = " nodad" if ":" in address else ""
        self._run(self._holders[host], f"ip address add {address}/{self._prefix} dev {interface}{options}")
        self._run(self._holders[host], f"ip link set {interface} up")

    @staticmethod
    def _port(host: int) -> str:
        return f"port{host}"

    @staticmethod
    def _run(holder: subprocess.Popen[bytes], command: str) -> None:
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{holder.pid}/ns/net", *command.split()],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise HostsUnavailableError(f"{command!r} is not possible here: {done.stderr.strip()}")


def sent_nbytes(interface: str = LINK, process: str = "self") -> int:
    """Return the number of bytes that the host of a process has sent over an interface; 0 if it has none of that name."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        if line.strip().startswith(f"{interface}:"):
            return int(line.split(":")[1].split()[8])
    return 0


def enter(namespace: str) -> None:
    """Move this process, which may have only one thread, onto the host with a namespace of `Hosts.namespaces`.

    Raises:
        OSError: This process may not enter it.
    """
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    finally:
        os.close(descriptor)
