#!/usr/bin/env bash
# One would guess: compare_set(key, expected, desired) returns what is stored afterwards, so a caller that gets `expected` back knows
# that the key holds it.
# torch 2.13.0, TCPStore, FileStore and HashStore: for a key that does not exist and an expected value that is not empty, it returns
# the expected value and stores nothing. The key still does not exist.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
TCPStore: returns b'old', the key exists: False
FileStore: returns b'old', the key exists: False
HashStore: returns b'old', the key exists: False
OUT
cat > program.py <<'PY'
import torch.distributed as dist

for store in (dist.TCPStore("127.0.0.1", 0, 1, True), dist.FileStore("file", 1), dist.HashStore()):
    returned = store.compare_set("key", "old", "new")
    print(f"{type(store).__name__}: returns {returned}, the key exists: {store.check(['key'])}")
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
