"""Runs one random world: starts its processes, injects the faults of its plan, and passes what happens to the judge."""

import contextlib
import math
import os
import shutil
import signal
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

from benchmarks.processes import RankEndedError
from tests.chaos.judge import Judge, ViolationError
from tests.chaos.networks import Proxied, Separated, SharedMemory
from tests.chaos.plan import HEARTBEAT
from tests.chaos.strangers import Strangers
from tests.support.faults import Proxy

PROGRAM = Path(__file__).parent / "program_chaos.py"
_START_WITHIN = 60.0
_SETTLE_WITHIN = 40.0
"""Seconds without faults after which the members must go on together."""
_END_WITHIN = 20.0
_PAUSE = 0.5
"""Seconds after which a fault of the store is tried again that meets another one."""
_LONGEST_STEP = 0.25
"""The seconds that count of the time between two looks: a runner that gets no processor blames no process."""
_VISIT_EVERY = 0.1
"""Seconds between two visits of strangers, who look for new ports."""
_STARVED = "could not run for"
"""A process logs it when it could not beat for long."""


class ChaosWorld:
    """One run of a plan.

    Args:
        plan: The plan.
        nursery: Starts the processes.
        hosts: The two hosts for a plan over ``hosts``.
        keep: The folder in which a failure leaves the output and dumps of the processes.
    """

    def __init__(self, plan, nursery, hosts, keep):
        self.plan, self._nursery, self._keep = plan, nursery, keep
        self.judge = Judge(plan)
        self.done = []
        """The kinds of the faults that happened."""
        self.rounds = self.calls = self.failed_calls = self.versions = 0
        self._folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        self._network = {
            "shm": lambda: SharedMemory(plan),
            "tcp": lambda: Proxied(plan),
            "hosts": lambda: Separated(plan, hosts),
        }[plan.network]()
        self._store = self._store_proxy = None
        self._processes = {}
        """By witness, the process."""
        self._silent = set()
        """Processes that report nothing any more."""
        self._slots = {}
        """By slot, the witness of the process that has it now."""
        self._children = []
        self.strangers, self._visit_at = Strangers(), 0.0
        self._events = []
        """What is to come: time, function."""
        self._store_port, self._store_fault = 0, None
        self._now, self._looked_at = 0.0, time.monotonic()
        self._log = []

    # -- running -------------------------------------------------------------------------------

    def run(self):
        """Run the world to its end; raise ViolationError with the folder of what is left of it."""
        try:
            try:
                self._run()
            except RankEndedError as ended:
                raise ViolationError(str(ended)) from None
        except ViolationError as violation:
            self._save(violation)
            raise
        finally:
            for child in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            self._nursery.clear()
            self.strangers.close()
            if self._store_proxy is not None:
                self._store_proxy.close()
            self._network.close()
            shutil.rmtree(self._folder)

    def _run(self):
        if self.plan.joins:
            self._store = self._start_store(0)
            if any(fault.kind == "store cut" for fault in self.plan.faults):
                self._store_proxy = Proxy(self._network.store_host, self._store_port)
        for slot in range(self.plan.size):
            self._start(slot)
            if slot == 0 and self.plan.stops_founder:
                self._stop_founder(self._slots[0])
        self._until(
            lambda: all(one.state == "member" or one.stops for one in self.judge.witnesses), _START_WITHIN, "start"
        )
        if self.plan.stops_founder:
            self._resume(self._slots[0])
            self._until(lambda: self._slots[0].state == "member", _START_WITHIN, "take in the founder")
        begun = self._now
        for fault in self.plan.faults:
            self._events.append((begun + fault.at, lambda fault=fault: self._begin(fault)))
        self._until(lambda: not self._events, self.plan.ends_at + 30.0, "finish the faults")
        self.judge.settle()
        self._until(lambda: self.judge.has_settled, _SETTLE_WITHIN, "go on together")
        if not self.plan.joins:
            self.judge.check_survivors(starved=self._is_starved())
        for witness, process in self._processes.items():
            if witness.is_alive and witness.state != "ended" and witness not in self._silent:
                with contextlib.suppress(BrokenPipeError):
                    process.say(("end",))
        living = [one for one in self.judge.witnesses if one.is_alive]
        self._until(lambda: all(one.state == "ended" for one in living), _END_WITHIN, "end")
        for witness in living:
            if status := self._processes[witness].wait(_END_WITHIN):
                raise ViolationError(f"{witness.name} has ended with status {status}")
        self.judge.check_accusations(math.inf, starved=self._is_starved())
        self._check_left()

    def _stop_founder(self, witness):
        """Stop the process that waits first, and that therefore names the members of the job."""
        self._until(lambda: witness.has_waited, _START_WITHIN, "join")
        self._note(f"{witness.name} is stopped before it founds")
        self._processes[witness].stop()
        self.judge.stop(witness)

    def _until(self, is_true, limit, what):
        until = self._now + limit
        while not is_true():
            self._step()
            if self._now > until:
                states = ", ".join(
                    f"{one.name} ({one.state}, generation {one.generation})"
                    for one in self.judge.witnesses
                    if one.is_alive
                )
                raise ViolationError(f"the members did not {what} within {limit:.0f} s: {states}")

    def _step(self):
        """Hear what the processes report, do what is due, and look at the time."""
        listening = {process: witness for witness, process in self._processes.items() if witness not in self._silent}
        due = min((at for at, _ in self._events), default=self._now + 1.0)
        ready = wait(list(listening), max(0.0, min(0.05, due - self._now)))
        now = time.monotonic()
        self._now += min(now - self._looked_at, _LONGEST_STEP)
        self._looked_at = now
        for process in ready:
            self._hear(listening[process], process)
        for event in sorted([event for event in self._events if event[0] <= self._now], key=lambda event: event[0]):
            self._events.remove(event)
            event[1]()
        if self.plan.has_strangers and self._now >= self._visit_at:
            self._visit()
        self.judge.check_progress(self._now)
        if self.judge.accusations:
            self.judge.check_accusations(self._now, starved=self._is_starved())

    def _visit(self):
        """Let strangers connect to all ports, those of processes that are stopped included."""
        store = [] if self._store is None else [self._store.pid]
        self.strangers.visit([*store, *(one.pid for one in self.judge.witnesses if one.is_alive)])
        self._visit_at = self._now + _VISIT_EVERY

    def _hear(self, witness, process):
        for _ in range(100):
            try:
                report = process.hear(0.0)
            except TimeoutError:
                return
            except RankEndedError:
                self._silent.add(witness)
                if witness.is_alive and witness.state != "ended":
                    raise ViolationError(f"{witness.name} has ended by itself with status {process.wait()}") from None
                return
            self._handle(witness, process, report)

    def _handle(self, witness, process, report):
        if report[0] == "addresses":
            process.say(("proxies", self._network.addresses_for(witness.slot, *report[1:])))
        elif report[0] == "rounds":
            self.rounds += len(report[1])
        elif report[0] == "called":
            self.calls += len(report[1])
            self.failed_calls += report[2]
        elif report[0] == "read":
            self.versions += 1
        else:
            self._note(f"{witness.name}: {' '.join(map(str, report))}")
        if report[0] == "forked":
            self._children.append(report[1])
        self.judge.hear(witness, report, self._now)

    def _is_starved(self):
        """Return whether some process could not run for long; the others are unknown."""
        return any(_STARVED in each.output() for each in self._processes.values())

    def _note(self, text):
        self._log.append(f"{self._now:7.3f}  {text}")

    # -- processes -----------------------------------------------------------------------------

    def _environment(self, slot):
        return {
            "ASYNCDIST_TRANSPORT": self._network.transport,
            "ASYNCDIST_HEARTBEAT": str(HEARTBEAT),
            "ASYNCDIST_TOKEN": "for this world only",
            "ASYNCDIST_DUMP_DIR": str(self._folder / "dumps"),
            "ASYNCDIST_HOST": f"host{self._host_of(slot)}" if self.plan.network == "hosts" else "",
        }

    def _host_of(self, slot):
        return self.plan.hosts[slot % self.plan.size]

    def _start_store(self, port):
        namespace = getattr(self._network, "store_namespace", None)
        folder, environment = str(self._folder / "store"), self._environment(0)
        process = self._nursery.start(
            PROGRAM, "chaos_store", namespace, self._network.store_host, port, folder, environment=environment
        )
        self._store_port = process.hear()
        return process

    def _start(self, slot, *, through_proxy=True):
        number = sum(one.slot == slot for one in self.judge.witnesses)
        name = f"process {slot}" + (f" ({number + 1})" if number else "")
        host, port = self._network.store_host, self._store_port
        proxied = self._store_proxy if through_proxy else None
        job = f"asyncdist://{host}:{port}/chaos"
        settings = {
            "slot": slot,
            "seed": self.plan.seed,
            "size": self.plan.size,
            "face": self.plan.faces[slot % self.plan.size],
            "joins": self.plan.joins,
            "min_size": self.plan.min_size,
            "start_size": self.plan.start_size if number == 0 and slot < self.plan.size else None,
            "proxied": self._network.is_proxied,
            "namespace": self._network.namespace(slot),
            "folder": str(self._folder),
            "services": job,
            "where": f"file://{self._folder}/world",
        }
        if self.plan.joins:
            settings["where"] = job if proxied is None else f"asyncdist://{host}:{proxied.address[1]}/chaos"

        process = self._nursery.start(PROGRAM, "chaos_process", settings, environment=self._environment(slot))
        witness = self.judge.add(slot, name, self._now)
        witness.pid = process.pid
        self._processes[witness] = process
        self._slots[slot] = witness
        self._note(f"{name} has process id {process.pid}")

    # -- faults --------------------------------------------------------------------------------

    def _begin(self, fault):
        witnesses = (
            [self._slots[slot] for slot in fault.victims] if fault.kind not in ("unplug", "blackhole", "blink") else []
        )
        if any(not one.is_alive or one.state in ("out", "leaves", "ended") for one in witnesses):
            return
        self._note(str(fault))
        self.done.append(fault.kind)
        self.judge.harm(fault, self._now)
        if fault.kind.startswith("store "):
            self._disturb_store(fault)
            return
        if fault.kind == "kill":
            self._kill(witnesses[0], fault.seconds)
        elif fault.kind in ("stop", "pause"):
            self._processes[witnesses[0]].stop()
            self.judge.stop(witnesses[0])
            self._events.append((self._now + fault.seconds, lambda: self._resume(witnesses[0])))
        elif witnesses and len(witnesses) == 1:
            command = (fault.kind, fault.seconds) if fault.kind in ("fork", "callback") else (fault.kind,)
            self._processes[witnesses[0]].say(command)
        else:
            self._network.begin(fault)
            self._events.append((self._now + fault.seconds, lambda: self._end(fault)))

    def _disturb_store(self, fault):
        if self._store_fault is not None:
            self._events.append((self._now + _PAUSE, lambda: self._disturb_store(fault)))
            return
        self._store_fault = fault
        if fault.kind == "store stop":
            self._store.stop()
        elif fault.kind == "store crash":
            self._store.kill()
            self._store.wait(_END_WITHIN)
        else:
            self._store_proxy.clog()
            self._store_proxy.cut()
            number = sum(one.slot >= self.plan.size for one in self.judge.witnesses)
            self._start(self.plan.size + number, through_proxy=False)
        self._events.append((self._now + fault.seconds, lambda: self._mend_store(fault)))

    def _mend_store(self, fault):
        self._store_fault = None
        self._note(f"the end of {fault.kind}")
        if fault.kind == "store stop":
            self._store.resume()
        elif fault.kind == "store crash":
            self._store = self._start_store(self._store_port)
        else:
            self._store_proxy.unclog()

    def _end(self, fault):
        self._network.end(fault)
        self._note(f"the end of {fault.kind} {fault.victims}")

    def _kill(self, witness, seconds):
        self.judge.killed(witness)
        self._processes[witness].kill()
        if self.plan.joins:
            self._events.append((self._now + seconds, lambda: self._start(witness.slot)))

    def _resume(self, witness):
        if witness.is_alive:
            self.judge.resume(witness, self._now)
            if not witness.stops:
                self._processes[witness].resume()
                self._note(f"{witness.name} continues")

    # -- the end -------------------------------------------------------------------------------

    def _check_left(self):
        for process in self._processes.values():
            if "VIOLATION" in (output := process.output()) or "Traceback" in output:
                raise ViolationError(f"a process wrote: {output}")
        left = [path.name for path in self._folder.iterdir() if path.name not in ("dumps", "store")]
        if left and not any(one.is_harmed for one in self.judge.witnesses):
            raise ViolationError(f"files are left: {left}")
        # Forked children live for some time.
        until = time.monotonic() + _END_WITHIN
        for child in self._children:
            while Path(f"/proc/{child}/stat").exists() and _state_of(child) != "Z":
                if time.monotonic() > until:
                    raise ViolationError(f"the forked child {child} has not ended")
                time.sleep(0.01)

    def _save(self, violation):
        """Keep what explains a failure: the story, the stacks, the output and the dumps of the processes."""
        for witness, process in self._processes.items():
            if witness.is_alive and witness not in self._silent:
                with contextlib.suppress(ProcessLookupError):
                    process.resume()
                    os.kill(process.pid, signal.SIGUSR1)
                    os.kill(process.pid, signal.SIGUSR2)
        time.sleep(1.0)
        shutil.rmtree(self._keep, ignore_errors=True)
        self._keep.mkdir(parents=True)
        for one in self.judge.witnesses:
            self._note(f"{one.name}: {one.state}, generation {one.generation}, last progress at {one.progress:.3f}")
        plan = [str(self.plan), *(f"  {fault}" for fault in self.plan.faults)]
        (self._keep / "story.txt").write_text("\n".join([*plan, "", *self._log, "", str(violation), ""]))
        for witness, process in self._processes.items():
            (self._keep / f"{witness.name}.txt".replace(" ", "_")).write_text(process.output())
        if (self._folder / "dumps").is_dir():
            shutil.copytree(self._folder / "dumps", self._keep / "dumps")


def _state_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return "Z"
