#!/usr/bin/env bash
# One would guess: a put under a key that exists replaces the value, or says that it did not: each call answers with a status, 0 is success.
# Mooncake 0.3.13: the status is 0 and the old value stays, also for a tensor of another shape and dtype. Weights that are published twice
# under one name stay those of the first time. Only upsert replaces.
set -euo pipefail
work=$(mktemp -d)
trap 'kill "$master" 2> /dev/null || true; rm -rf "$work"' EXIT
master=
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check mooncake-transfer-engine-non-cuda==0.3.13.post1 torch==2.13.0 numpy==2.4.2
mooncake=$(env/bin/python -c "import mooncake; print(mooncake.__path__[0])")
# The wheel is linked to libibverbs also where tcp is used; Debian and Ubuntu have it.
if ! ldconfig -p | grep -q libibverbs.so.1; then
  apt-get -qq download libibverbs1 libnl-3-200 libnl-route-3-200 2> /dev/null
  for package in *.deb; do dpkg -x "$package" libraries; done
  export LD_LIBRARY_PATH="$work/libraries/usr/lib/$(uname -m)-linux-gnu:$work/libraries/lib/$(uname -m)-linux-gnu"
fi
export LD_LIBRARY_PATH="$mooncake:${LD_LIBRARY_PATH:-}" OMP_NUM_THREADS=1
read -r port metrics < <(env/bin/python -c "
import socket
print(*[s.getsockname()[1] for s in [socket.create_server(('127.0.0.1', 0)) for _ in range(2)]])")
"$mooncake/mooncake_master" -rpc_address=127.0.0.1 -rpc_port="$port" -metrics_port="$metrics" > master.log 2>&1 &
master=$!
cat > expected <<'OUT'
put 0, then b'first'
put_batch 0, then b'first'
put_tensor 0, then [1.0, 1.0]
put_tensor of another shape and dtype 0, then [1.0, 1.0]
batch_put_tensor [0], then [1.0, 1.0]
upsert_tensor 0, then [2.0, 2.0]
OUT
cat > program.py <<'PY'
import socket
import sys
import time

import torch
from mooncake.store import MooncakeDistributedStore


def client(port):
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 24, 1 << 24, "tcp", "", f"127.0.0.1:{port}") == 0
    return store


store = client(int(sys.argv[1]))
assert store.put("bytes", b"first") == 0
print(f"put {store.put('bytes', b'second')}, then {store.get('bytes')}")
print(f"put_batch {store.put_batch(['bytes'], [b'third'])}, then {store.get('bytes')}")
ones = torch.ones(2)
assert store.put_tensor("weights", ones) == 0
calls = {
    "put_tensor": lambda: store.put_tensor("weights", ones * 2),
    "put_tensor of another shape and dtype": lambda: store.put_tensor("weights", torch.zeros(3, dtype=torch.int64)),
    "batch_put_tensor": lambda: store.batch_put_tensor(["weights"], [ones * 2]),
    "upsert_tensor": lambda: store.upsert_tensor("weights", ones * 2),
}
for name, call in calls.items():
    print(f"{name} {call()}, then {store.get_tensor('weights').tolist()}")
store.close()
PY
env/bin/python -W ignore program.py "$port" > seen 2> errors || { cat seen errors master.log >&2; exit 1; }
cat seen
diff expected seen
