#!/usr/bin/env bash
# One would guess: an exception of a remote function has one class at the caller, however the function was called.
# torch 2.13.0: ValueError arrives as ValueError from rpc_sync, rpc_async and RRef.to_here. KeyError arrives as RuntimeError from the
# first two, and as KeyError from to_here: `except KeyError` around rpc_sync never matches.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.2
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
value_error: rpc_sync ValueError, rpc_async ValueError, to_here ValueError
key_error: rpc_sync RuntimeError, rpc_async RuntimeError, to_here KeyError
OUT
cat > program.py <<'PY'
import contextlib
import os
import pathlib
import sys

import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def value_error():
    raise ValueError("value")


def key_error():
    raise KeyError("key")


def outcome(call):
    try:
        with contextlib.redirect_stdout(sys.stderr):
            call()
    except Exception as error:
        return type(error).__name__


def start(rank):
    store = pathlib.Path("store").absolute().as_uri()
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=store),
    )
    if rank == 0:
        for function in (value_error, key_error):
            print(
                f"{function.__name__}:",
                f"rpc_sync {outcome(lambda: rpc.rpc_sync('worker1', function))},",
                f"rpc_async {outcome(lambda: rpc.rpc_async('worker1', function).wait())},",
                f"to_here {outcome(lambda: rpc.remote('worker1', function).to_here())}",
                flush=True,
            )
    rpc.shutdown()


if __name__ == "__main__":
    os.environ["TP_VERBOSE_LOGGING"] = "0"
    mp.spawn(start, nprocs=2)
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
