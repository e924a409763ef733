#!/usr/bin/env bash
# One would guess: current_rank() in an endpoint names the actor, as a rank does elsewhere: the one that holds shard 1 has rank 1, however it
# was addressed.
# Monarch 0.7.0: it is the position in the mesh to which the caller sent this message. The same actor is rank 1 in its own mesh, rank 0 in a
# slice of one or in one that leaves out the first, and an actor that picks its shard by it reads another's. What __init__ saw stays right.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torchmonarch==0.7.0 numpy==2.4.2
export OMP_NUM_THREADS=1
cat > expected <<'OUT'
the mesh: rank 0 in __init__ reads ones; rank 1 in __init__ reads twos; rank 2 in __init__ reads threes
its slice [1:]: rank 1 in __init__ reads ones; rank 2 in __init__ reads twos
its slice [1]: rank 1 in __init__ reads ones
OUT
cat > actors.py <<'PY'
from monarch.actor import Actor, current_rank, endpoint

SHARDS = ["ones", "twos", "threes"]


class Worker(Actor):
    def __init__(self):
        self.rank = current_rank().rank

    @endpoint
    def read(self):
        return f"rank {self.rank} in __init__ reads {SHARDS[current_rank().rank]}"
PY
cat > program.py <<'PY'
from actors import Worker
from monarch.actor import this_host

if __name__ == "__main__":
    workers = this_host().spawn_procs(per_host={"processes": 3}).spawn("workers", Worker)
    meshes = {
        "the mesh": workers,
        "its slice [1:]": workers.slice(processes=slice(1, None)),
        "its slice [1]": workers.slice(processes=1),
    }
    for name, mesh in meshes.items():
        print(f"{name}: {'; '.join(mesh.read.call().get(timeout=120).values())}")
PY
env/bin/python -W ignore program.py 2> errors | grep -v "^Monarch internal logs" > seen || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
