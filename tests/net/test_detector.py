"""The failure detector: single cases, and thousands of simulated jobs with pauses, delays, cuts and deaths."""

import heapq
import random

import pytest

from asyncdist.net.detector import BEATS, Detector, Liveness

TIMEOUT = 10.0
PERIOD = TIMEOUT / BEATS


def looked(detector, start, count, heard, step=PERIOD):
    """Look ``count`` times; return each verdict with the number of its look."""
    found = []
    for number in range(1, count + 1):
        found += [(number, verdict) for verdict in detector.look(start + number * step, heard)]
    return found


def watching(*peers):
    detector = Detector(TIMEOUT)
    assert detector.look(0.0, dict.fromkeys(peers, True)) == []
    return detector


def test_silent_peer_is_suspected_then_lost_and_the_others_are_not():
    found = looked(watching(1, 2), 0.0, BEATS, {1: False, 2: True})
    assert [(number, verdict.liveness, verdict.peer) for number, verdict in found] == [
        (7, Liveness.SUSPECTED, 1),
        (10, Liveness.LOST, 1),
    ]
    assert found[-1][1].silence == pytest.approx(TIMEOUT)
    assert not found[-1][1].is_alone


def test_peer_that_is_heard_again_recovers_and_its_time_starts_anew():
    detector = watching(1)
    looked(detector, 0.0, 9, {1: False})
    assert detector.suspects == [1]
    (verdict,) = detector.look(9.5 * PERIOD, {1: True})
    assert (verdict.liveness, detector.suspects) == (Liveness.RECOVERED, [])
    assert [number for number, _ in looked(detector, 9.5 * PERIOD, BEATS, {1: False})] == [7, 10]


def test_peer_is_watched_from_the_first_look_that_names_it_and_forgotten_without_a_connection():
    detector = watching(1)
    looked(detector, 0.0, 9, {1: False})
    assert detector.look(10 * PERIOD, {}) == []
    assert looked(detector, 10 * PERIOD, 6, {1: False}) == []
    assert detector.silence(1) == pytest.approx(5 * PERIOD)


@pytest.mark.parametrize(
    ("later", "lost_at"), [(1, {1: 10, 2: 10}), (2, {1: 10, 2: 12})], ids=["a period later", "two periods later"]
)
def test_ranks_of_a_silent_host_are_lost_together(later, lost_at):
    """Rank 2 is last heard some periods after rank 1, which is on the same host."""
    detector = Detector(TIMEOUT, lambda peer: {1, 2} if peer < 3 else {3})
    detector.look(0.0, {1: True, 2: True, 3: True})
    found = looked(detector, 0.0, later, {1: False, 2: True, 3: True})
    found += looked(detector, later * PERIOD, 12, {1: False, 2: False, 3: True})
    lost = {verdict.peer: verdict.silence for _, verdict in found if verdict.liveness is Liveness.LOST}
    assert {peer: round((lost[peer] + (later * PERIOD if peer == 2 else 0.0)) / PERIOD) for peer in lost} == lost_at


def test_rank_whose_host_is_heard_is_not_lost_early():
    """Rank 3 of the same host is heard, so nothing is known about rank 2 but its own silence."""
    detector = Detector(TIMEOUT, lambda peer: {1, 2, 3})
    detector.look(0.0, {1: True, 2: True, 3: True})
    looked(detector, 0.0, 1, {1: False, 2: True, 3: True})
    found = looked(detector, PERIOD, BEATS, {1: False, 2: False, 3: True})
    lost = [(number, verdict.peer) for number, verdict in found if verdict.liveness is Liveness.LOST]
    assert lost == [(9, 1), (10, 2)]


@pytest.mark.parametrize(("looks", "lost"), [(9, [2]), (7, [])], ids=["silent for long", "not silent for long"])
def test_peer_is_lost_when_another_rank_has_lost_one_of_its_host(looks, lost):
    """Another rank has lost rank 1, which this rank does not watch, and which is on the host of rank 2."""
    detector = Detector(TIMEOUT, lambda peer: {1, 2} if peer < 3 else {3})
    detector.look(0.0, {2: True, 3: True})
    looked(detector, 0.0, looks - 1, {2: False, 3: True})
    found = detector.look(looks * PERIOD, {2: False, 3: True}, {1})
    assert [verdict.peer for verdict in found if verdict.liveness is Liveness.LOST] == lost


def test_ranks_of_a_silent_host_that_accepts_no_connection_are_lost_with_the_one_that_was_heard():
    detector = Detector(TIMEOUT, lambda peer: {1, 2, 4} if peer != 3 else {3})
    detector.look(0.0, {1: True, 3: True})
    looked(detector, 0.0, 8, {1: False, 3: True})
    heard, found = {1: False, 3: True}, []
    for number in (9, 10):
        found += detector.look(number * PERIOD, heard, frozenset(), {2, 4})
    assert [(each.liveness, each.peer) for each in found] == [
        (Liveness.SUSPECTED, 2),
        (Liveness.SUSPECTED, 4),
        (Liveness.LOST, 1),
        (Liveness.LOST, 2),
        (Liveness.LOST, 4),
    ]
    assert [verdict.silence for verdict in found[2:]] == [pytest.approx(TIMEOUT)] * 3


def test_rank_of_a_host_that_another_rank_has_lost_is_lost_if_the_host_accepts_no_connection():
    detector = Detector(TIMEOUT, lambda peer: {1, 2} if peer != 3 else {3})
    detector.look(0.0, {3: True})
    assert detector.look(PERIOD, {3: True}, {1}) == []
    assert detector.look(2 * PERIOD, {3: True}, frozenset(), {3}) == []
    (verdict,) = detector.look(3 * PERIOD, {3: True}, frozenset(), {2})
    assert (verdict.liveness, verdict.peer) == (Liveness.LOST, 2)


@pytest.mark.parametrize("sign", ["the suspect recovers", "its host accepts"])
def test_rank_of_a_silent_host_is_not_lost_once_the_host_lives(sign):
    detector = Detector(TIMEOUT, lambda peer: {1, 2})
    detector.look(0.0, {1: True})
    looked(detector, 0.0, 8, {1: False})
    assert [each.peer for each in detector.look(9 * PERIOD, {1: False}, frozenset(), {2})] == [2]
    if sign == "its host accepts":
        found = detector.look(10 * PERIOD, {1: False, 2: False})
        found += looked(detector, 10 * PERIOD, 6, {2: False})
        assert [(each.liveness, each.peer) for each in found if type(each) is not tuple] == [(Liveness.LOST, 1)]
    else:
        found = detector.look(10 * PERIOD, {1: True}, frozenset(), {2})
        assert [(each.liveness, each.peer) for each in found] == [(Liveness.RECOVERED, 1)]
        assert detector.peers == [1]


def test_rank_that_was_stopped_itself_blames_nobody():
    detector = watching(1, 2)
    looked(detector, 0.0, 4, {1: False, 2: False})
    assert detector.look(1000 * PERIOD, {1: False, 2: True}) == []
    assert [number for number, _ in looked(detector, 1000 * PERIOD, 5, {1: False, 2: True})] == [1, 4]


def test_loss_says_who_hears_the_peer_and_whether_this_rank_hears_anybody():
    detector = watching(1, 2)
    detector.answer(1, 4, is_heard=True)
    looked(detector, 0.0, 7, {1: False, 2: False})
    for witness, is_heard in ((5, True), (3, True), (6, False)):
        detector.answer(1, witness, is_heard=is_heard)
    lost = [verdict for _, verdict in looked(detector, 7 * PERIOD, 3, {1: False, 2: False})]
    assert [(each.heard_by, each.unheard_by, each.is_alone) for each in lost] == [((3, 5), (6,), True), ((), (), True)]
    assert detector.suspects == []


def test_excuses_delay_the_loss_until_they_end():
    detector = watching(1)
    detector.excuse(1)
    looked(detector, 0.0, 7, {1: False})
    for number in range(8, 60):
        assert detector.look(number * PERIOD, {1: False}) == []
        detector.excuse(1)
    assert [number for number, _ in looked(detector, 59 * PERIOD, 5, {1: False})] == [3]


@pytest.mark.parametrize("without_limit", [False, True])
def test_excuses_of_one_silence_have_a_limit_unless_a_debugger_holds_the_peer(without_limit):
    detector = watching(1)
    for number in range(1, 200):
        if lost := [each for each in detector.look(number * PERIOD, {1: False}) if each.liveness is Liveness.LOST]:
            break
        detector.excuse(1, without_limit=without_limit)
    assert bool(lost) is not without_limit
    if lost:
        assert lost[0].silence == pytest.approx(12 * TIMEOUT, abs=2 * PERIOD)


class Job:
    """Ranks that beat to each other over channels with delays and cuts. Each looks and beats at its own, uneven times.

    Beats may overtake each other, and single beats may be lost.
    """

    def __init__(self, seed, sizes=range(2, 9), end=40.0, pause=0.6):
        self.pause = pause
        """The longest pause of a rank, as a part of the timeout."""
        self.random = random.Random(seed)
        self.size = self.random.choice(sizes)
        self.end = end
        self.lost = {}
        """The time at which a rank declared another one lost, by both ranks."""
        self.looks = [self.times_of(rank) for rank in range(self.size)]

    def times_of(self, rank):
        """The times at which a rank looks and beats: about once in a period, with pauses of less than the timeout."""
        at, times = self.random.uniform(0, PERIOD), []
        while at < self.end:
            times.append(at)
            at += PERIOD * self.random.uniform(0.9, 1.1)
            if self.random.random() < 0.05:
                at += self.random.uniform(0, self.pause) * TIMEOUT
        return times

    def run(self, dies=None, cuts=(), cut_at=5.0, busy=None, loss=0.0, delay=0.2):
        """Run the job.

        Args:
            dies: A rank and when it ends.
            cuts: The channels, sender and receiver, that carry nothing from ``cut_at`` on.
            busy: A rank, and from when to when it works without beating, which the other ranks see.
            loss: How likely a beat is lost, unless the sender's beat before was lost.
            delay: The longest time that a beat takes, as a part of the timeout.
        """
        detectors = [Detector(TIMEOUT) for _ in range(self.size)]
        arrived = [{peer: False for peer in range(self.size) if peer != rank} for rank in range(self.size)]
        events = [(at, 1, rank, -1) for rank, times in enumerate(self.looks) for at in times]
        heapq.heapify(events)
        missed = set()
        while events:
            at, is_look, rank, sender = heapq.heappop(events)
            if not is_look:
                if sender in arrived[rank]:
                    arrived[rank][sender] = True
                continue
            if dies is not None and rank == dies[0] and at >= dies[1]:
                continue
            is_busy = busy is not None and busy[1] <= at < busy[2]
            if is_busy and rank == busy[0]:
                continue
            for peer in arrived[rank]:
                if (rank, peer) not in missed and self.random.random() < loss:
                    missed.add((rank, peer))
                    continue
                missed.discard((rank, peer))
                if not ((rank, peer) in cuts and at >= cut_at):
                    heapq.heappush(events, (at + self.random.uniform(0, delay) * TIMEOUT, 0, peer, rank))
            for verdict in detectors[rank].look(at, arrived[rank]):
                if verdict.liveness is Liveness.LOST:
                    self.lost[rank, verdict.peer] = at
                    del arrived[rank][verdict.peer]
            arrived[rank].update(dict.fromkeys(arrived[rank], False))
            if is_busy:
                detectors[rank].excuse(busy[0])
        return self.lost

    def check_in_time(self, rank, noticed, since):
        """Check that a rank has noticed in time what happened at ``since``."""
        # What this rank missed in its own pauses does not count; its next look may be after another pause.
        paused = sum(
            later - early - PERIOD
            for early, later in zip(self.looks[rank], self.looks[rank][1:], strict=False)
            if later > since and early < noticed and later - early > 1.5 * PERIOD
        )
        assert noticed - since <= 0.2 * TIMEOUT + TIMEOUT + 2 * PERIOD + paused, rank

    def check_losses(self, pairs, since, seed):
        """Check that each first rank of the pairs has lost the second in time, and nobody else."""
        assert self.lost.keys() == pairs, seed
        for (rank, _), noticed in self.lost.items():
            self.check_in_time(rank, noticed, since)

    def check_death(self, dead, at, seed):
        self.run(dies=(dead, at))
        self.check_losses({(rank, dead) for rank in range(self.size) if rank != dead}, at, seed)


FEW, MANY = range(40), pytest.param(range(40, 2000), marks=pytest.mark.exhaustive)
LARGE = [16, 33, 64]


def jobs(seeds, pause=0.6):
    """Return jobs of 2 to 8 ranks; among many also some of up to 64."""
    for seed in seeds:
        yield seed, Job(seed, pause=pause)
    if len(seeds) > 100:
        for seed in range(6):
            yield seed, Job(seed, [LARGE[seed % 3]], 40.0, pause)


@pytest.mark.parametrize("seeds", [FEW, MANY])
@pytest.mark.parametrize(("loss", "pause"), [(0.0, 0.6), (0.1, 0.2)])
def test_rank_that_beats_within_the_timeout_and_reaches_all_is_never_lost(seeds, loss, pause):
    """With lost beats the pauses before and after one of them count together."""
    for seed, job in jobs(seeds, pause):
        assert job.run(loss=loss) == {}, seed


@pytest.mark.parametrize("seeds", [FEW, MANY])
def test_silent_rank_is_lost_on_every_other_rank_and_no_other_rank_is(seeds):
    for seed, job in jobs(seeds):
        job.check_death(job.random.randrange(job.size), job.random.uniform(5.0, 12.0), seed)


@pytest.mark.parametrize("size", [2, 3])
def test_death_at_every_twentieth_of_a_period(size):
    for dead in range(size):
        for moment in range(60):
            Job(moment, [size]).check_death(dead, 5.0 + moment * PERIOD / 20, (dead, moment))


@pytest.mark.parametrize("seeds", [FEW, MANY])
def test_channel_that_fails_in_one_direction_costs_only_its_two_ends(seeds):
    for seed, job in jobs(seeds):
        sender, receiver = job.random.sample(range(job.size), 2)
        lost = job.run(cuts={(sender, receiver)})
        # The receiver beats to a lost peer no more.
        assert list(lost) in ([(receiver, sender)], [(receiver, sender), (sender, receiver)]), seed
        job.check_in_time(receiver, lost[receiver, sender], 5.0)


@pytest.mark.parametrize("seeds", [FEW, MANY])
def test_separated_sides_lose_each_other_and_nobody_on_their_own_side(seeds):
    for seed, job in jobs(seeds):
        side = set(job.random.sample(range(job.size), job.random.randrange(1, job.size)))
        pairs = {(one, two) for one in range(job.size) for two in range(job.size) if (one in side) != (two in side)}
        job.run(cuts=pairs)
        job.check_losses(pairs, 5.0, seed)


@pytest.mark.parametrize("seeds", [FEW, MANY])
def test_rank_that_is_seen_at_work_is_spared_for_some_timeouts_and_then_lost(seeds):
    for seed in seeds:
        short, long = (Job(seed, range(2, 5), end, pause=0.0) for end in (100.0, 190.0))
        rank, begun = short.random.randrange(short.size), 5.0
        assert short.run(busy=(rank, begun, begun + 8 * TIMEOUT), delay=0.05) == {}, seed
        lost = long.run(busy=(rank, begun, 190.0))
        assert {each for each in lost if each[1] == rank} == {
            (other, rank) for other in range(long.size) if other != rank
        }, seed
