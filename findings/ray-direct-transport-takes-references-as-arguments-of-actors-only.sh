#!/usr/bin/env bash
# One would guess: a reference to a tensor that Ray moves directly between actors can be used like any other reference: in a list, in a
# task, or in ray.get.
# Ray 2.60.0 with torch 2.13.0 (gloo): it arrives as an argument of its own of an actor's method. Within a list, the call is refused by
# NotImplementedError; ray.get is refused by ValueError; a task that is no actor fails with an AttributeError from inside of Ray.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check ray==2.60.0 torch==2.13.0 numpy==2.4.2
export OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
an argument of a method: [1.0, 1.0]
in a list: NotImplementedError
ray.get: ValueError
an argument of a task: AttributeError
OUT
cat > program.py <<'PY'
import ray
import torch
from ray.experimental.collective import create_collective_group


@ray.remote
class Actor:
    @ray.method(tensor_transport="gloo")
    def make(self):
        return torch.ones(2)

    def take(self, value):
        return value.tolist()

    def take_list(self, values):
        return ray.get(values[0]).tolist()


@ray.remote
def task(value):
    return value.tolist()


def outcome(call):
    try:
        return ray.get(call(), timeout=60)
    except ray.exceptions.RayTaskError as error:
        return "AttributeError" if "AttributeError" in str(error) else str(error)
    except Exception as error:
        return type(error).__name__


ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
maker, taker = (Actor.remote() for _ in range(2))
create_collective_group([maker, taker], backend="gloo")
calls = {
    "an argument of a method": lambda: taker.take.remote(maker.make.remote()),
    "in a list": lambda: taker.take_list.remote([maker.make.remote()]),
    "ray.get": maker.make.remote,
    "an argument of a task": lambda: task.remote(maker.make.remote()),
}
for words, call in calls.items():
    print(f"{words}: {outcome(call)}")
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
