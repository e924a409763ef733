"""The addresses that ranks listen on and advertise, on pretended hosts."""

import asyncio

import pytest

from asyncdist.base.deadline import Deadline
from asyncdist.config import Config
from asyncdist.environment import Launch
from asyncdist.errors import AddressError, LookUpTimeoutError, RendezvousTimeoutError
from asyncdist.net.network import InterfaceAddress, is_loopback
from asyncdist.rendezvous import addresses
from tests.support.ports import free_port

OURS = "10.0.0.7"


@pytest.fixture
def host(monkeypatch):
    """Be a host with one card, whose name ``debian`` means 127.0.1.1 here, as its /etc/hosts has it."""
    names = {"debian": ["127.0.1.1"], "node0": ["10.0.0.1"], "dual": ["fd00::7", OURS]}

    async def look_up(name):
        return names[name]

    def route(to):
        return "127.0.0.1" if is_loopback(to) else "fd00::7" if ":" in to else OURS

    monkeypatch.setattr(addresses, "_look_up", look_up)
    monkeypatch.setattr(addresses, "address_towards", route)
    monkeypatch.setattr(addresses, "is_local", lambda one: is_loopback(one) or one in (OURS, "fd00::7"))
    cards = [InterfaceAddress("lo", "127.0.0.1"), InterfaceAddress("eth0", OURS), InterfaceAddress("ib0", "10.9.0.7")]
    monkeypatch.setattr(addresses, "interface_addresses", lambda: cards)


def soon():
    return Deadline.after(5)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("name", "interface", "listens"),
    [("debian", None, (OURS, True)), ("debian", "eth0", (OURS, False)), ("dual", None, (OURS, False)),
     (OURS, None, (OURS, False)), ("localhost", None, ("127.0.0.1", False)), ("127.0.0.1", None, ("127.0.0.1", False)),
     ("127.3.2.1", None, ("127.3.2.1", False))],
)  # fmt: skip
async def test_name_means_an_address_of_this_host_which_is_a_guess_where_it_resolves_to_loopback(
    name, interface, listens
):
    assert await addresses.to_listen_on(name, Config(interface=interface), soon()) == listens


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(("name", "dialled"), [("debian", [OURS]), ("dual", [OURS, "fd00::7"])])
async def test_name_is_dialled_at_addresses_that_are_valid_on_other_hosts_ipv4_first(name, dialled):
    assert await addresses.reachable(name, Config(), soon()) == dialled


@pytest.mark.usefixtures("host")
async def test_rank_0_on_the_wrong_host_is_refused():
    with pytest.raises(
        AddressError, match=r"at node0 \(10\.0\.0\.1\), which is not an address of this host: .*eth0 \(10"
    ):
        await addresses.to_listen_on("node0", Config(), soon())


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("store", "interface", "own"),
    [("10.0.0.1", None, OURS), ("fd00::1", None, "fd00::7"), ("127.0.0.1", None, "127.0.0.1"),
     ("10.0.0.1", "ib", "10.9.0.7"), ("10.0.0.1", "^lo,ib", OURS), ("127.0.0.1", "=eth0", OURS)],
)  # fmt: skip
def test_route_to_the_store_is_advertised_unless_an_interface_is_configured(store, interface, own):
    assert addresses.advertised(store, Config(interface=interface)) == own


def test_loopback_is_not_advertised_to_other_hosts(host, monkeypatch):
    monkeypatch.setattr(addresses, "address_towards", lambda to: "127.0.0.1")
    assert addresses.advertised("10.0.0.1", Config()) == OURS


def test_loopback_is_advertised_without_a_network(host, monkeypatch):
    monkeypatch.setattr(addresses, "address_towards", lambda to: None)
    monkeypatch.setattr(addresses, "interface_addresses", lambda: [InterfaceAddress("lo", "127.0.0.1")])
    assert addresses.outward(Config()) == "127.0.0.1"


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("rule", ["wlan", "=eth", "^lo,eth,ib"])
def test_error_of_an_unknown_interface_lists_the_existing_ones(rule):
    with pytest.raises(AddressError, match=r"matches no usable interface .* has lo \(127.*eth0 \(10.*ib0 \(10"):
        addresses.advertised("10.0.0.1", Config(interface=rule))


async def test_name_is_resolved_again_until_it_is_known(monkeypatch, caplog):
    """It is said at once that it does not, and once only."""
    answers = iter([OSError("not known"), OSError("not known"), ["10.0.0.7"]])

    async def look_up(_):
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(addresses, "_look_up", look_up)
    assert await addresses.resolve("late", Deadline.after(10)) == ["10.0.0.7"]
    assert [record.getMessage() for record in caplog.records] == [
        "host 'late' does not resolve (not known): retrying for up to 30 s"
    ]


@pytest.mark.parametrize("cut_short_by", ["deadline", "deadline of an agent's store", "clock of the loop"])
async def test_lookup_that_is_cut_short_does_not_blame_the_name(meet_as, monkeypatch, cut_short_by):
    answers = [["127.0.0.1"]]

    async def look_up(*_):
        if not answers and cut_short_by == "clock of the loop":
            raise LookUpTimeoutError("cut short")  # and the deadline has not come
        if not answers:
            await asyncio.Event().wait()
        return answers.pop()

    monkeypatch.setattr(addresses, "outward", lambda config: "127.0.0.1")
    if cut_short_by == "clock of the loop":
        monkeypatch.setattr("asyncdist.rendezvous.join.reachable", look_up)
    else:
        monkeypatch.setattr(addresses, "_look_up", look_up)
    agent_store = cut_short_by == "deadline of an agent's store"
    where = Launch(rank=1, world_size=2, master_addr="debian", master_port=free_port(), agent_store=agent_store)
    with pytest.raises(RendezvousTimeoutError, match=r"had not found rank 0 .*Connect(ion refused| call failed)"):
        await meet_as(launch=where, config=Config(token="secret"), timeout=0.5)


async def test_lookup_that_takes_too_long_is_named(monkeypatch):
    monkeypatch.setattr(addresses, "_look_up", lambda name: asyncio.Event().wait())
    with pytest.raises(LookUpTimeoutError, match="did not resolve host 'debian' in time"):
        await addresses.resolve("debian", Deadline.after(0.01))


@pytest.mark.parametrize("interface", [None, "=lo"])
async def test_timeout_names_a_guessed_address(meet_as, monkeypatch, interface):
    async def look_up(_):
        return ["127.0.1.1"]

    monkeypatch.setattr(addresses, "_look_up", look_up)
    monkeypatch.setattr(addresses, "outward", lambda config: "127.0.0.1")
    launch = Launch(rank=0, world_size=2, master_addr="debian", master_port=free_port())
    meeting = await meet_as(launch=launch, config=Config(token="secret", interface=interface))
    with pytest.raises(RendezvousTimeoutError) as late:
        await meeting.exchange(b"", timeout=0.1)
    guess = " (served at 127.0.0.1; ASYNCDIST_SOCKET_IFNAME chooses another)" if interface is None else ""
    assert f"had joined at tcp://debian:{launch.master_port}{guess}: joined 0, missing 1" in str(late.value)
