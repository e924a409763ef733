"""What connects the processes of a world, and how a fault disturbs it."""

import contextlib

from tests.chaos.plan import BETWEEN, OF_A_HOST
from tests.support.faults import Proxy

_DELAY = 0.02
"""Seconds that each chunk of a delayed connection takes."""


class SharedMemory:
    """One host. Nothing disturbs shared memory itself."""

    transport = "shm"
    is_proxied = False
    store_host = "127.0.0.1"

    def __init__(self, plan):
        self.plan = plan

    def namespace(self, slot):
        return None

    def begin(self, fault):
        """Begin a fault of connections."""

    def end(self, fault):
        """End a fault of connections."""

    def close(self):
        """Remove everything."""


class Proxied(SharedMemory):
    """One host with TCP. The connections of the pairs that the plan disturbs go through proxies of the runner."""

    transport = "tcp"
    is_proxied = True

    def __init__(self, plan):
        super().__init__(plan)
        self._pairs = {frozenset(fault.victims) for fault in plan.faults if fault.kind in BETWEEN}
        self._proxies = {}
        """By the writer's slot and the address of the reader."""
        self._owners = {}
        """The slots, by the addresses at which their processes listen."""
        self._active = []

    def addresses_for(self, slot, rank, addresses):
        """Return the proxies for the connections of a process, by rank; None for a direct connection."""
        self._owners[addresses[rank]] = slot
        return [None if address is None else self._address_for(slot, address) for address in addresses]

    def _address_for(self, slot, address):
        # The owner is known once it asks itself, which may be later. Faults begin after all have met.
        if not any(slot in pair for pair in self._pairs) or self._owners.get(address) == slot:
            return None
        key = slot, address
        if key not in self._proxies:
            self._proxies[key] = Proxy(*address)
            for fault in self._active:
                self._begin_on(fault, key)
        return self._proxies[key].address

    def _directions(self, fault):
        """Return the proxies between two slots, and whether their target is the second one."""
        first, second = fault.victims
        for slot, address in list(self._proxies):
            owner = self._owners.get(address)
            if (slot, owner) in ((first, second), (second, first)):
                yield self._proxies[slot, address], slot == first

    def begin(self, fault):
        if fault.kind != "cut":
            self._active.append(fault)
        for proxy, is_forward in self._directions(fault):
            self._disturb(proxy, fault, is_forward)

    def _begin_on(self, fault, key):
        for proxy, is_forward in self._directions(fault):
            if proxy is self._proxies[key]:
                self._disturb(proxy, fault, is_forward)

    @staticmethod
    def _disturb(proxy, fault, is_forward):
        match fault.kind:
            case "cut":
                proxy.cut()
            case "drop":
                proxy.drop(to_target=is_forward)
            case "clog" | "hold":
                proxy.clog()
            case "delay":
                proxy.delay = _DELAY

    def end(self, fault):
        if fault not in self._active:
            return
        self._active.remove(fault)
        same = [other.kind for other in self._active if set(other.victims) == set(fault.victims)]
        for proxy, _ in self._directions(fault):
            if fault.kind == "drop" and "drop" not in same:
                proxy.restore()
            elif fault.kind in ("clog", "hold") and "clog" not in same and "hold" not in same:
                proxy.unclog()
            elif fault.kind == "delay" and "delay" not in same:
                proxy.delay = 0.0

    def close(self):
        for proxy in self._proxies.values():
            proxy.close()
        self._proxies.clear()


class Separated(SharedMemory):
    """Two hosts in network namespaces, each with shared memory, and TCP between them."""

    transport = "auto"

    def __init__(self, plan, hosts):
        super().__init__(plan)
        self._hosts = hosts
        self._active = []
        self._states = [(False, False)] * 2
        self.store_host = hosts.addresses[0]

    def namespace(self, slot):
        return self._hosts.namespaces[self.plan.hosts[slot]]

    @property
    def store_namespace(self):
        return self._hosts.namespaces[0]

    def begin(self, fault):
        if fault.kind in OF_A_HOST:
            self._active.append(fault)
            self._set_up()

    def end(self, fault):
        with contextlib.suppress(ValueError):
            self._active.remove(fault)
            self._set_up()

    def _set_up(self):
        """Bring both links into the state that the active faults ask for."""
        is_cut = any(fault.kind in ("unplug", "blink") for fault in self._active)
        for host in (0, 1):
            loses = any(fault.kind == "blackhole" and fault.victims == (host,) for fault in self._active)
            state = (is_cut and host == 0, loses)
            if state != self._states[host]:
                self._states[host] = state
                self._hosts.restore(host)
                if state[0]:
                    self._hosts.cut(host)
                if state[1]:
                    self._hosts.drop(host)

    def close(self):
        for fault in list(self._active):
            self.end(fault)
