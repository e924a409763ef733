#!/usr/bin/env bash
# One would guess: delete_key says whether there was such a key; of FileStore the documentation says that it raises an exception.
# torch 2.13.0: TCPStore and HashStore answer False for a key that never existed. FileStore raises nothing, and answers True: a claim
# that is built on the answer has one owner in two stores, and any number of them in the third.
. "$(dirname "$0")/common"
install torch==2.13.0
expect <<'OUT'
TCPStore: False
HashStore: False
FileStore: True
OUT
run <<'PY'
import torch.distributed as dist

for store in (dist.TCPStore("127.0.0.1", 0, 1, True), dist.HashStore(), dist.FileStore("file", 1)):
    print(f"{type(store).__name__}: {store.delete_key('never set')}")
PY
