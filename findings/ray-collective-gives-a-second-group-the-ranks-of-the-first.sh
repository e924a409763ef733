#!/usr/bin/env bash
# One would guess: each collective group of Ray numbers its actors as init_collective_group was told, whatever other groups they are in.
# Ray 2.60.0 with torch 2.13.0 (gloo): an actor's first group decides. In a second group with the ranks the other way round, get_rank
# answers as told, but broadcast from rank 0 sends the value of rank 1, and after reduce to rank 0 nobody has the sum, without an error.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check ray==2.60.0 torch==2.13.0 numpy==2.4.2
export OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
first: rank 0 has [1.0], rank 1 has [1.0] after broadcast from rank 0
first: rank 0 has [3.0], rank 1 has [2.0] after reduce to rank 0
second: rank 0 has [2.0], rank 1 has [2.0] after broadcast from rank 0
second: rank 0 has [1.0], rank 1 has [2.0] after reduce to rank 0
OUT
cat > program.py <<'PY'
import ray
import torch
from ray.util import collective


@ray.remote
class Actor:
    def join(self, group, rank):
        collective.init_collective_group(2, rank, "gloo", group)
        return collective.get_rank(group)

    def call(self, operation, group):
        tensor = torch.tensor([collective.get_rank(group) + 1.0])
        getattr(collective, operation)(tensor, 0, group)
        return tensor.tolist()


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
actors = [Actor.remote() for _ in range(2)]
for group in ("first", "second"):
    assert ray.get([actor.join.remote(group, rank) for rank, actor in enumerate(actors)]) == [0, 1]
    for operation, words in {"broadcast": "broadcast from rank 0", "reduce": "reduce to rank 0"}.items():
        values = ray.get([actor.call.remote(operation, group) for actor in actors])
        print(f"{group}: rank 0 has {values[0]}, rank 1 has {values[1]} after {words}")
    actors.reverse()
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
