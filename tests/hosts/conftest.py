"""Two hosts for tests, which are skipped where this machine cannot make hosts."""

from __future__ import annotations

import pytest

from asyncdist.testing.hosts import Hosts, HostsUnavailableError


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    try:
        return (yield)
    except HostsUnavailableError as error:
        pytest.skip(error.summary)


@pytest.fixture
def hosts():
    """Two hosts, or the reason why the test is skipped."""
    try:
        hosts = Hosts()
    except HostsUnavailableError as error:
        pytest.skip(error.summary)
    with hosts:
        yield hosts
