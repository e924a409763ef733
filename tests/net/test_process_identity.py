"""Whether a process of this host has ended, as its peers find out."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from asyncdist.net.process_identity import has_ended, process_identity

pytestmark = pytest.mark.skipif(process_identity() is None, reason="this system has no /proc")

PROGRAM = """
import json, sys
from asyncdist.net.process_identity import process_identity
print(json.dumps(process_identity()), flush=True)
sys.stdin.read()
"""


def test_process_has_ended_when_it_is_killed_and_before_its_parent_asks_for_its_status():
    own = process_identity()
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        identity = json.loads(process.stdout.readline())
        assert not has_ended(identity, own)
        process.kill()
        # The end of the pipe comes before the state of the process changes.
        process.stdout.read()
        while not has_ended(identity, own):
            pass
        assert process.returncode is None
    assert has_ended(identity, own)


def test_number_that_another_process_has_now_is_not_taken_for_the_process():
    own = process_identity()
    assert not has_ended(own, own)
    assert has_ended({**own, "started": own["started"] - 1}, own)


@pytest.mark.parametrize("key", ["host", "pids"])
def test_process_that_cannot_be_seen_is_not_known_to_have_ended(key):
    own = process_identity()
    elsewhere = {**own, key: "another", "pid": 0}
    assert not has_ended(elsewhere, own)
    assert not has_ended(None, own)
    assert not has_ended(own, None)


def test_processes_of_hosts_with_different_names_do_not_see_each_other():
    own, other = process_identity("one"), process_identity("two")
    assert not has_ended(other | {"pid": 1 << 22}, own)
    assert has_ended(own | {"pid": 1 << 22}, own)
