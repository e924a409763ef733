#!/usr/bin/env bash
# One would guess: delete_key says whether there was such a key; of FileStore the documentation says that it raises an exception.
# torch 2.13.0: TCPStore and HashStore answer False for a key that never existed. FileStore raises nothing, and answers True: a claim
# that is built on the answer has one owner in two stores, and any number of them in the third.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
TCPStore: False
HashStore: False
FileStore: True
OUT
cat > program.py <<'PY'
import torch.distributed as dist

for store in (dist.TCPStore("127.0.0.1", 0, 1, True), dist.HashStore(), dist.FileStore("file", 1)):
    print(f"{type(store).__name__}: {store.delete_key('never set')}")
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
