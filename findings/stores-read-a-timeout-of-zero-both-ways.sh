#!/usr/bin/env bash
# One would guess: a timeout of 0 means the same in all stores of torch.distributed: look once, and do not wait.
# torch 2.13.0: Store.wait with 0 fails at once in TCPStore, and waits without a limit in HashStore; with -1 ms it is the other way
# round. (The key is set after a second, when the waits without a limit return.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
HashStore 0 ms: waits
HashStore -1 ms: fails at once
TCPStore 0 ms: fails at once
TCPStore -1 ms: waits
OUT
cat > program.py <<'PY'
import datetime
import threading

import torch.distributed as dist

hash_store = dist.HashStore()
tcp_store = dist.TCPStore("127.0.0.1", 0, 1, True)
tcp_client = dist.TCPStore("127.0.0.1", tcp_store.port, 1, False)
for store, setter in ((hash_store, hash_store), (tcp_store, tcp_client)):
    for milliseconds in (0, -1):
        key = f"key {milliseconds}"
        timer = threading.Timer(1.0, setter.set, (key, "value"))
        timer.start()
        try:
            store.wait([key], datetime.timedelta(milliseconds=milliseconds))
            outcome = "waits"
        except dist.DistStoreError:
            outcome = "fails at once"
        timer.join()
        print(f"{type(store).__name__} {milliseconds} ms: {outcome}")
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
