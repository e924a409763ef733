"""``asyncdist bench --hosts``: a whole run between two hosts, compared with gloo and plain sockets."""

import json
import subprocess
import sys

import pytest


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.usefixtures("hosts")
def test_run_between_hosts_names_the_link_as_the_limit(tmp_path):
    command = [sys.executable, "-m", "asyncdist.cli", "bench", "all_reduce", "--hosts", "2", "--ranks-per-host", "2"]
    command += ["--link", "100mbit", "--sizes", "4,4M", "--repeat", "3", "--against", "gloo,raw"]
    run = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, check=False, timeout=200
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads((tmp_path / "hosts.json").read_text())
    small, large = figures["rows"]
    assert set(small["contenders"]) == {"asyncdist", "gloo", "raw"}
    # 4 MiB cross the link once in each direction, which takes 336 ms.
    assert 0.3 < large["contenders"]["asyncdist"]["median_us"] / 1e6 < 0.42
    page = (tmp_path / "hosts.md").read_text()
    assert "2 hosts with 2 ranks each, links of 100mbit" in page
    assert (tmp_path / "hosts.png").stat().st_size > 10_000
