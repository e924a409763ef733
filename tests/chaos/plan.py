"""What happens in a random world: its processes, its faults and its operations. All of it follows from the seed.

Equal seeds give equal plans. When a fault hits an operation still differs from run to run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

HEARTBEAT = 1.0
"""`ASYNCDIST_HEARTBEAT` of all worlds, in seconds."""
LONGER, SHORTER = 2.5 * HEARTBEAT, 0.25 * HEARTBEAT
"""How long a process is silent that must be lost, and one that must not be lost."""

NETWORKS = ("shm", "tcp", "hosts")
"""One host with shared memory; one host whose connections can be disturbed; two network namespaces with both."""
FACES = ("blocking", "awaiting")

_EVERYWHERE = {
    "kill": 4, "stop": 2, "pause": 2, "exception": 2, "fork": 2, "revoke": 1, "cancel": 1, "leave": 1,
    "callback": 2,
}  # fmt: skip
_WEIGHTS = {
    "shm": _EVERYWHERE,
    "tcp": {**_EVERYWHERE, "cut": 3, "drop": 2, "clog": 2, "hold": 2, "delay": 2},
    "hosts": {**_EVERYWHERE, "unplug": 2, "blackhole": 2, "blink": 2},
}
"""The faults in each network, and how often each is drawn. `Fault` says what they do."""

_OF_THE_STORE = {"store stop": 2, "store crash": 2, "store cut": 3}
"""The faults of the store of a job that replaces its members, and how often each is drawn."""

BETWEEN = ("cut", "drop", "clog", "hold", "delay")
"""The faults of the connections between two ranks."""
OF_A_HOST = ("unplug", "blackhole", "blink")
"""The faults of the link of a host."""
HARMLESS = ("pause", "exception", "fork", "revoke", "cancel", "callback", "hold", "delay", "blink", *_OF_THE_STORE)
"""The faults after which every rank must go on."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a plan.

    ==========  ==================================================================================
    kill        SIGKILL; in a job that replaces its members another process starts after ``seconds``
    stop        SIGSTOP for longer than the heartbeat limit
    pause       SIGSTOP for less than the heartbeat limit
    exception   the rank raises an exception in the middle of a step
    fork        the rank forks a child that inherits its connections and lives for ``seconds``
    revoke      the rank revokes its group
    cancel      the rank cancels an await, or stops to wait for a work
    leave       the rank leaves in order
    callback    a callback or a hook of the rank takes longer than the heartbeat limit
    cut         the connections between two ranks are reset
    drop        what one rank sends to another one is lost for ``seconds``
    clog        nothing passes between two ranks for longer than the heartbeat limit
    hold        nothing passes between two ranks for less than the heartbeat limit
    delay       everything between two ranks takes longer for ``seconds``
    unplug      the link between the hosts is down for ``seconds``
    blackhole   what one host sends to the other one is lost for ``seconds``
    blink       the link between the hosts is down for less than the heartbeat limit
    store stop  SIGSTOP of the store for ``seconds``
    store crash SIGKILL of the store, which another one follows after ``seconds`` with its data
    store cut   the members lose the store alone for ``seconds``, while a further process joins that reaches it
    ==========  ==================================================================================

    Attributes:
        at: Seconds after the beginning of the first round.
        kind: The kind.
        victims: The slots of the processes: one, or two for a fault between two ranks. For a fault of a link, the host. For
            a fault of the store, nothing.
        seconds: How long it lasts.
    """

    at: float
    kind: str
    victims: tuple[int, ...]
    seconds: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.at:5.2f} s  {self.kind} {', '.join(map(str, self.victims))}{lasting}".replace("  for", " for")


@dataclass(frozen=True, slots=True)
class WorldPlan:
    """A world of a plan.

    Attributes:
        seed: The seed.
        network: One of `NETWORKS`.
        joins: Whether the processes join a job that replaces lost members. Otherwise the founders regroup.
        faces: The API that the process of each slot uses.
        hosts: The host of each slot.
        faults: The faults, in the order of their time.
        stops_founder: Whether the process that would name the first members is stopped until the others have begun.
    """

    seed: int
    network: str
    joins: bool
    faces: tuple[str, ...]
    hosts: tuple[int, ...]
    faults: tuple[Fault, ...]
    stops_founder: bool = False

    @property
    def size(self) -> int:
        return len(self.faces)

    @property
    def start_size(self) -> int:
        """The number of members with which a job that replaces its members begins."""
        return self.size - self.stops_founder

    @property
    def min_size(self) -> int:
        """The smallest number of members with which a job that replaces its members goes on."""
        return 1 + self.seed % max(1, self.size - 1)

    @property
    def has_strangers(self) -> bool:
        """Whether strangers hold connections open at the ports of all processes."""
        return self.network != "hosts" and Random(f"{self.seed} strangers").random() < 0.5

    @property
    def ends_at(self) -> float:
        """Seconds after the beginning of the first round at which no fault acts any more."""
        return max((fault.at + fault.seconds for fault in self.faults), default=0.0)

    def __str__(self) -> str:
        placed = "".join(str(host) for host in self.hosts)
        how = f"a job of {self.size}, at least {self.min_size}" if self.joins else f"{self.size} founders"
        how += ", the first one stopped" if self.stops_founder else ""
        faces = "".join(face[0] for face in self.faces)
        faults = f"{len(self.faults)} faults" + (", strangers" if self.has_strangers else "")
        return f"seed {self.seed}: {how} over {self.network} (hosts {placed}, {faces}), {faults}"


def plan_of(seed: int, networks: Sequence[str] = NETWORKS) -> WorldPlan:
    """Return the plan of a world. ``networks`` are those that this machine can have."""
    draw = Random(seed)
    network = draw.choice(networks)
    size = draw.choice((2, 3, 3, 4, 4, 5, 6, 8))
    faces = tuple(draw.choice(FACES) for _ in range(size))
    hosts = (0,) * size
    if network == "hosts":
        hosts = (0, 1, *(draw.randrange(2) for _ in range(size - 2)))
    joins = draw.random() < 0.4
    weights = dict(_WEIGHTS[network])
    if joins:
        del weights["leave"]
        weights.update(_OF_THE_STORE)
    if network == "hosts":
        weights.pop("store cut", None)
    faults, at = [], 0.0
    for kind in draw.choices(list(weights), list(weights.values()), k=draw.randint(1, 6)):
        # Half of the faults come while the members deal with the one before.
        at += draw.choice((draw.uniform(0.0, 0.1), draw.uniform(0.0, 2.5 * HEARTBEAT)))
        faults.append(_fault(draw, at, kind, size))
    stops_founder = joins and draw.random() < 0.15
    return WorldPlan(seed, network, joins, faces, hosts, tuple(faults), stops_founder)


def _fault(draw: Random, at: float, kind: str, size: int) -> Fault:
    if kind in BETWEEN:
        victims = tuple(draw.sample(range(size), 2))
    elif kind in OF_A_HOST:
        victims = (draw.randrange(2),)
    elif kind in _OF_THE_STORE:
        victims = ()
    else:
        victims = (draw.randrange(size),)
    if kind in ("pause", "hold"):
        seconds = draw.uniform(0.0, SHORTER)
    elif kind == "blink":
        # TCP sends lost packets again after 0.2 s, then after 0.6 s.
        seconds = draw.uniform(0.0, 0.15)
    elif kind in ("stop", "callback", "drop", "clog", "unplug", "blackhole"):
        seconds = draw.uniform(1.3 * HEARTBEAT, LONGER)
    elif kind in _OF_THE_STORE:
        # A lease lasts for 2 s.
        seconds = draw.uniform(0.3, 4.5)
    elif kind in ("kill", "fork", "delay"):
        seconds = draw.uniform(0.0, 1.5 * HEARTBEAT)
    else:
        seconds = 0.0
    return Fault(round(at, 3), kind, victims, round(seconds, 3))


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a round.

    Attributes:
        name: Its name.
        count: The number of elements that each rank contributes.
        dtype: The name of the dtype of its tensors.
        root: The rank of the root.
        salt: A number in the values.
    """

    name: str
    count: int
    dtype: str
    root: int
    salt: int


OPERATIONS = (
    "all_reduce", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "ring", "objects", "barrier"
)  # fmt: skip
_DTYPES = ("int32", "int64", "float32", "float64")


def operations_of(seed: int, generation: int, number: int, size: int) -> tuple[bool, list[Operation]]:
    """Return whether a round runs its operations at once, and the operations. It is the same on all members."""
    draw = Random(f"{seed} {generation} {number}")
    operations = [
        Operation(
            draw.choice(OPERATIONS),
            int(10 ** draw.uniform(0, 5.3 if draw.random() < 0.2 else 3)),
            draw.choice(_DTYPES),
            draw.randrange(size),
            draw.randrange(100),
        )
        for _ in range(draw.randint(1, 3))
    ]
    return draw.random() < 0.5, operations
