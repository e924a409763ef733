#!/usr/bin/env bash
# One would guess: split_group splits a group of gloo, whose ranks are CPUs, because the default group may be bound to any device.
# torch 2.13.0: it splits only a default group with a device, and only an accelerator can be given. So ranks on CPUs make each
# group by new_group, which all ranks of the world have to call.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.2
cat > expected <<'OUT'
no device: No device associated with the default pg, not safe to split any process groups
cpu: init_process_group device_id parameter must be an accelerator with an index
cpu:0: init_process_group device_id parameter must be an accelerator with an index
OUT
cat > program.py <<'PY'
import torch
import torch.distributed as dist

for name in ("no device", "cpu", "cpu:0"):
    device = None if name == "no device" else torch.device(name)
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        print(f"{name}: {type(dist.split_group(None, [[0]])).__name__}")
    except (ValueError, RuntimeError) as error:
        print(f"{name}: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
