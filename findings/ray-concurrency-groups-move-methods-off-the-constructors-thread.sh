#!/usr/bin/env bash
# One would guess: a concurrency group moves the methods that are named in it to threads of its own; the other methods run where they ran,
# on the thread of __init__, and what __init__ set for that thread holds.
# Ray 2.60.0, torch 2.13.0: with any concurrency group, no method runs on the thread of __init__. An inference actor that switches
# gradients off in __init__ records them in every call as soon as one method, here a health check, gets a group.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check ray==2.60.0 torch==2.13.0 numpy==2.4.2
export OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
no group: thread of __init__ True, records gradients False
a group for health: thread of __init__ False, records gradients True
OUT
cat > program.py <<'PY'
import threading

import ray
import torch


class Model:
    def __init__(self):
        torch.set_grad_enabled(False)
        self.thread = threading.get_ident()
        self.layer = torch.nn.Linear(1, 1)

    def infer(self):
        output = self.layer(torch.ones(1))
        return f"thread of __init__ {threading.get_ident() == self.thread}, records gradients {output.requires_grad}"

    def health(self):
        return True


class ModelWithGroup(Model):
    @ray.method(concurrency_group="health")
    def health(self):
        return True


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
actors = {
    "no group": ray.remote(Model),
    "a group for health": ray.remote(concurrency_groups={"health": 1})(ModelWithGroup),
}
for name, actor in actors.items():
    print(f"{name}: {ray.get(actor.remote().infer.remote())}")
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
