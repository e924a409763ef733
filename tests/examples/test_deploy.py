"""The files of examples/deploy for Slurm, Kubernetes and containers, run by stand-ins of these."""

import json
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.ports import free_port

pytestmark = pytest.mark.processes
DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
LIMIT = 60
PROGRAM = """
import os
import torch
import asyncdist.sync as dist

dist.init_process_group(init_method=os.environ.get("MEETING"))
ranks = torch.ones(1)
dist.all_reduce(ranks)
print(f"rank {dist.get_rank()} counts {int(ranks)}", flush=True)
dist.destroy_process_group()
"""
SCONTROL = """#!/bin/sh
test "$1 $2 $3" = "show hostnames 127.0.0.[1-2]" && printf '127.0.0.1\\n127.0.0.2\\n'
"""
SRUN = """#!/bin/sh
test "$1" = --kill-on-bad-exit=1 && shift
for rank in 0 1 2; do
    SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=3 SLURM_LOCALID=$rank "$@" &
    ranks="$ranks $!"
done
for each in $ranks; do wait $each || status=1; done
exit ${status:-0}
"""


@pytest.fixture
def place(tmp_path):
    """A folder with the ranks' program, and the environment in which it finds python."""
    (tmp_path / "train.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    # Unbuffered output writes a line and its end separately, and the lines of several ranks mix.
    return tmp_path, {**os.environ, "PATH": path, "PYTHONUNBUFFERED": ""}


@pytest.fixture
def store(tmp_path):
    """Start a store with some arguments of ``asyncdist store`` and return its address; it is stopped afterwards."""
    started = []

    def store(*arguments, **variables):
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncdist.cli", *arguments],
            stdout=subprocess.PIPE, text=True, env={**os.environ, **variables},
        )  # fmt: skip
        started.append(process)
        ready = process.stdout.readline()
        return re.search(r"tcp://(\S+)", ready)[1]

    yield store
    for process in started:
        process.terminate()
        process.communicate(timeout=LIMIT)
        assert process.returncode == 0


@pytest.mark.exhaustive
def test_slurm_script_starts_all_ranks(place):
    folder, environment = place
    (folder / "bin").mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    environment |= {
        "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
        "SLURM_JOB_ID": str(12_768 * secrets.randbelow(1 << 20) + free_port() - 20_000),  # the script makes it a port
        "SLURM_CPUS_PER_TASK": "1",
    }
    ended = subprocess.run(
        ["bash", DEPLOY / "slurm.sh", "train.py"], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(ended.stdout.splitlines()) == [f"rank {rank} counts 3" for rank in range(3)]


@pytest.mark.exhaustive
def test_kubernetes_pods_meet_at_the_store(place, store):
    """The pods of a job meet at the store, and so do those that replace them."""
    folder, environment = place
    documents = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    service, job = documents["Service"], documents["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    token = secrets.token_hex(16)
    where = store("store", "--host", "127.0.0.1", "--port", "0", ASYNCDIST_TOKEN=token)
    name = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    for _ in range(2):
        pods = [
            subprocess.Popen(
                container["command"], cwd=folder, stdout=subprocess.PIPE, text=True,
                env=environment | variables(container, index, token, {name: where}),
            )
            for index in range(job["completions"])
        ]  # fmt: skip
        for rank, pod in enumerate(pods):
            said, _ = pod.communicate(timeout=LIMIT)
            assert (pod.returncode, said) == (0, f"rank {rank} counts {job['completions']}\n")


def variables(container, index, token, addresses):
    """Return the environment that a kubelet gives a pod, with addresses in place of the services' names."""
    found = {}
    for each in container["env"]:
        value, source = each.get("value", ""), each.get("valueFrom", {})
        if "secretKeyRef" in source:
            value = token
        elif "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"].endswith("job-completion-index']")
            value = str(index)
        for name, address in addresses.items():
            value = value.replace(name, address)
        found[each["name"]] = value
    return found


def test_entry_point_of_the_container_starts_a_store(store, tmp_path):
    """The command of the container starts, with another address and another folder."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    program, *arguments = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])
    assert program == "asyncdist"
    elsewhere = {"0.0.0.0": "127.0.0.1", "29500": "0", "9529": "0", "/data": str(tmp_path / "data")}
    assert store(*[elsewhere.get(each, each) for each in arguments], ASYNCDIST_TOKEN="secret").startswith("127.0.0.1:")
    assert list((tmp_path / "data").iterdir())
