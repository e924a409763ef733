#!/usr/bin/env bash
# One would guess: a timeout of 0 means the same in all stores of torch.distributed: look once, and do not wait.
# torch 2.13.0: Store.wait with 0 fails at once in TCPStore, and waits without a limit in HashStore; with -1 ms it is the other way
# round. (The key is set after a second, when the waits without a limit return.)
. "$(dirname "$0")/common"
install torch==2.13.0
expect <<'OUT'
HashStore 0 ms: waits
HashStore -1 ms: fails at once
TCPStore 0 ms: fails at once
TCPStore -1 ms: waits
OUT
run <<'PY'
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
