"""Where the ranks of a run are: on this machine, or on the hosts of a test bed. Used by `launch`. No torch here."""

from __future__ import annotations

from typing import Self

from asyncdist.cli.bench.plan import BenchPlan
from asyncdist.testing.hosts import LINK, Hosts

LOOPBACK = "127.0.0.1"


class Placement:
    """A context manager that makes the hosts of a plan, if it has several.

    Args:
        plan: The plan.

    Raises:
        HostsUnavailableError: This machine cannot make hosts.
    """

    def __init__(self, plan: BenchPlan) -> None:
        self._plan = plan
        self._hosts = Hosts(plan.hosts) if plan.hosts > 1 else None

    def __enter__(self) -> Self:
        if self._hosts is not None and self._plan.link:
            try:
                self._hosts.shape(self._plan.link)
            except BaseException:
                self._hosts.close()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._hosts is not None:
            self._hosts.close()

    def command(self, rank: int, command: list[str]) -> list[str]:
        """Return the command that runs a program where a rank is."""
        return command if self._hosts is None else self._hosts.command(self._plan.host_of(rank), *command)

    def environment(self, rank: int) -> dict[str, str] | None:
        """Return the variables of a program where a rank is; None for those of this process."""
        if self._hosts is None:
            return None
        # gloo would look up the name of the machine, whose address is not on these hosts.
        return {**self._hosts.environment(self._plan.host_of(rank)), "GLOO_SOCKET_IFNAME": LINK}

    def address(self, rank: int) -> str:
        """Return the address at which a rank listens for the other ranks of the benchmark."""
        return LOOPBACK if self._hosts is None else self._hosts.addresses[self._plan.host_of(rank)]
