#!/usr/bin/env bash
# One would guess: once the owner of a tensor has deregistered it, a peer's write to it fails, whether its handle was made before or after.
# NIXL 1.5.1, UCX over TCP, memory of the host: both writes end with DONE, and the tensor changes under its owner; so also after the peer has
# loaded the owner's metadata again. The peer is refused once it removes the whole agent. (unregister_memory of torch 2.15's transport over
# NIXL does not stop the peer's writes either.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check nixl-cu12==1.5.1 torch==2.13.0 numpy==2.4.2
export OMP_NUM_THREADS=1 NIXL_LOG_LEVEL=ERROR UCX_TLS=tcp,self
cat > expected <<'OUT'
registered: write DONE, the owner has [1.0, 1.0]
deregistered, handle from before: write DONE, the owner has [2.0, 2.0]
deregistered, new handle: write DONE, the owner has [3.0, 3.0]
deregistered, metadata loaded again: write DONE, the owner has [4.0, 4.0]
agent removed: write nixlNotFoundError, the owner has [4.0, 4.0]
OUT
cat > program.py <<'PY'
import torch
from nixl_cu12 import _api as nixl

config = nixl.nixl_agent_config(backends=["UCX"])
owner, peer = nixl.nixl_agent("owner", config), nixl.nixl_agent("peer", config)
owned, source = torch.zeros(2), torch.zeros(2)
registration = owner.register_memory(owned)
peer.register_memory(source)
remote = peer.deserialize_descs(owner.get_serialized_descs(owner.get_xfer_descs(owned)))
peer.add_remote_agent(owner.get_agent_metadata())


def new_handle():
    return peer.initialize_xfer("WRITE", peer.get_xfer_descs(source), remote, "owner")


def write(name, make_handle):
    source.add_(1)
    try:
        handle = make_handle()
        state = peer.transfer(handle)
        while state == "PROC":
            state = peer.check_xfer_state(handle)
    except Exception as error:
        state = type(error).__name__
    print(f"{name}: write {state}, the owner has {owned.tolist()}")


old_handle = new_handle()
write("registered", lambda: old_handle)
owner.deregister_memory(registration)
write("deregistered, handle from before", lambda: old_handle)
write("deregistered, new handle", new_handle)
peer.add_remote_agent(owner.get_agent_metadata())
write("deregistered, metadata loaded again", new_handle)
peer.remove_remote_agent("owner")
write("agent removed", new_handle)
PY
env/bin/python -W ignore program.py 2> errors | grep "^[a-z]" > seen || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
