#!/usr/bin/env bash
# One would guess: a back end of torch.distributed that is written in Python can have windows, because torch forwards its
# supports_window and new_window.
# torch 2.15.0: it says that it supports windows, but it can make none. The class Window has no constructor, neither has a class that
# derives from it, and the caller gets an error for any other object.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.15.0 numpy==2.4.2
cat > expected <<'OUT'
supports_window: True
Window(): No constructor defined!
a derived class: No constructor defined!
another object: Unable to cast Python instance of type <class 'object'> to C++ type
OUT
cat > program.py <<'PY'
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Window


class Derived(Window):
    def put(self, tensor, dst_rank, target_offset_nelems, async_op, opts=None):
        return None


class PythonBackend(Backend):
    supports_window = True

    def new_window(self, tensor=None):
        return object()


QUESTION = " '?'"
backend, kind = PythonBackend(0, 1), dist.ProcessGroup.BackendType.CUSTOM
group = dist.ProcessGroup(dist.HashStore(), 0, 1)
group._register_backend(torch.device("cpu"), kind, backend)
group._set_default_backend(kind)
print("supports_window:", dist._supports_window(group))
calls = {"Window()": Window, "a derived class": Derived, "another object": lambda: dist._new_window(group=group)}
for words, call in calls.items():
    try:
        print(f"{words}: {call()}")
    except (TypeError, RuntimeError) as error:
        text = str(error).removeprefix("torch._C._distributed_c10d.Window: ").removeprefix("Derived: ")
        print(f"{words}: {text.split(QUESTION)[0]}")
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
