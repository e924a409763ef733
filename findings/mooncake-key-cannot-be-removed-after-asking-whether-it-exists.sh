#!/usr/bin/env bash
# One would guess: a key that exists and that nobody reads can be removed; and a question does not change what it asks about.
# Mooncake 0.3.13: each look at a key, also is_exist and get_size, leases it for ten seconds (default_kv_lease_ttl), in which remove answers
# -706 (object has lease). "If it exists, remove it" never removes. A put or an upsert takes no lease, so without the question it works.
set -euo pipefail
work=$(mktemp -d)
trap 'kill "$master" 2> /dev/null || true; rm -rf "$work"' EXIT
master=
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check mooncake-transfer-engine-non-cuda==0.3.13.post1
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
nothing: remove 0, exists 0
put: remove 0, exists 0
upsert: remove 0, exists 0
is_exist: remove -706, exists 1
get_size: remove -706, exists 1
get: remove -706, exists 1
OUT
cat > program.py <<'PY'
import socket
import sys
import time

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
looks = {
    "nothing": lambda key: None,
    "put": lambda key: store.put(key, b"again"),
    "upsert": lambda key: store.upsert(key, b"again"),
    "is_exist": store.is_exist,
    "get_size": store.get_size,
    "get": store.get,
}
for name, look in looks.items():
    assert store.put(name, b"value") == 0
    look(name)
    print(f"{name}: remove {store.remove(name)}, exists {store.is_exist(name)}")
store.close()
PY
env/bin/python -W ignore program.py "$port" > seen 2> errors || { cat seen errors master.log >&2; exit 1; }
cat seen
diff expected seen
