#!/usr/bin/env bash
# One would guess: a back end that torch.distributed has accepted is used by Ignite as gloo is, or refused; the name decides nothing.
# pytorch-ignite 0.5.5, torch 2.13.0: with gloo registered under a second name, auto_dataloader divides the data over the ranks and all_reduce
# works, but auto_model leaves DDP out, without an error or a warning. Each rank trains its own model on its half of the data.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.2 pytorch-ignite==0.5.5
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
cat > expected <<'OUT'
gloo, rank 0: 2 of 4 samples, gradient 1.5, all_reduce 3, DistributedDataParallel
gloo, rank 1: 2 of 4 samples, gradient 1.5, all_reduce 3, DistributedDataParallel
third, rank 0: 2 of 4 samples, gradient 1.0, all_reduce 3, Linear
third, rank 1: 2 of 4 samples, gradient 2.0, all_reduce 3, Linear
OUT
cat > program.py <<'PY'
import multiprocessing
import pathlib

import ignite.distributed as idist
import torch
import torch.distributed as dist


def third(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def main(rank):
    samples = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    loader = idist.auto_dataloader(torch.utils.data.TensorDataset(samples), batch_size=4, shuffle=False)
    model = idist.auto_model(torch.nn.Linear(1, 1))
    [[batch]] = list(loader)
    model(batch).mean().backward()
    [gradient, _] = [parameter.grad for parameter in model.parameters()]
    reduced = idist.all_reduce(rank + 1)
    return f"{len(batch)} of 4 samples, gradient {gradient.item()}, all_reduce {reduced}, {type(model).__name__}"


WORLD_SIZE = 2


def start(backend, rank):
    dist.Backend.register_backend("third", third, devices=["cpu"])
    store = pathlib.Path(f"store_{backend}").absolute().as_uri()
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=WORLD_SIZE)
    result = main(rank)
    dist.barrier()
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    for backend in ("gloo", "third"):
        with multiprocessing.get_context("spawn").Pool(WORLD_SIZE) as pool:
            arguments = [(backend, rank) for rank in range(WORLD_SIZE)]
            for rank, result in enumerate(pool.starmap(start, arguments, chunksize=1)):
                print(f"{backend}, rank {rank}: {result}")
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
