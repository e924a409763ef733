#!/usr/bin/env bash
# One would guess: the float32 weights that DeepSpeed restores from its checkpoint are all of the model, whatever the ZeRO stage; loading them
# into a model without one would fail.
# deepspeed 0.19.8, torch 2.13.0: from a checkpoint of stage 1, frozen parameters are missing, though the file has them, and
# load_state_dict_from_zero_checkpoint leaves those of the new model as they are, without an error. Stage 2 restores them. float64 buffers
# become float32 either way.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv env
DS_BUILD_OPS=0 env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.2 deepspeed==0.19.8
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR DS_ACCELERATOR=cpu
cat > expected <<'OUT'
stage 1: restored learned.weight, time, and time 2**24 + 1 as 16777216.0; learned 5.0, frozen 7.0 in the file, 0.0 in the model
stage 2: restored frozen.weight, learned.weight, time, and time 2**24 + 1 as 16777216.0; learned 5.0, frozen 7.0 in the file, 7.0 in the model
OUT
cat > program.py <<'PY'
import contextlib
import io
import os
import pathlib

import torch
import torch.distributed as dist

# DeepSpeed's logger keeps the standard output that it finds when it is imported.
with contextlib.redirect_stdout(io.StringIO()):
    import deepspeed
    from deepspeed.utils import zero_to_fp32

# DeepSpeed would compile its own all-reduce for inference.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def new_model(learned, frozen):
    model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in ("learned", "frozen")})
    torch.nn.init.constant_(model.learned.weight, learned)
    torch.nn.init.constant_(model.frozen.weight, frozen)
    model.frozen.requires_grad_(False)
    model.register_buffer("time", torch.tensor(2**24 + 1, dtype=torch.float64))
    return model


def restore(stage):
    model = new_model(learned=5.0, frozen=7.0)
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.Adam(model.learned.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    folder = f"stage{stage}"
    engine.save_checkpoint(folder, tag="tag")
    [file] = pathlib.Path(folder).rglob("mp_rank_00_model_states.pt")
    saved = torch.load(file)["module"]["frozen.weight"].item()
    weights = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    new = zero_to_fp32.load_state_dict_from_zero_checkpoint(new_model(learned=0.0, frozen=0.0), folder)
    time = f"time 2**24 + 1 as {weights['time'].item()}"
    values = f"learned {new.learned.weight.item()}, frozen {saved} in the file, {new.frozen.weight.item()} in the model"
    return f"stage {stage}: restored {', '.join(sorted(weights))}, and {time}; {values}"


dist.init_process_group("gloo", init_method=pathlib.Path("store").absolute().as_uri(), rank=0, world_size=1)
for stage in (1, 2):
    with contextlib.redirect_stdout(io.StringIO()):
        result = restore(stage)
    print(result)
dist.destroy_process_group()
PY
env/bin/python -W ignore program.py > seen 2> errors || { cat seen errors >&2; exit 1; }
cat seen
diff expected seen
