"""DeepSpeed: a stage of ZeRO with torch's optimizer, and a saved and loaded checkpoint: ``deepspeed_zero.py STAGE``."""

import os
import sys

import deepspeed
import torch
from regression import BATCH, EPOCHS, RATE, check_weights, end_together, make_data, make_model, report, train_alone
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import asyncdist.torch_backend

stage = int(sys.argv[1])
# DeepSpeed would compile its own all-reduce for inference in shared memory.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend="asyncdist")
model, data = make_model(), make_data()
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
}
engine, _, _, _ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE), config=config
)
loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))
losses = []


def train() -> None:
    """Train for one epoch; keep the mean loss of all ranks."""
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        deepspeed.comm.all_reduce(mean, op=deepspeed.comm.ReduceOp.SUM)
        losses.append(mean.item() / 2)


for _ in range(EPOCHS):
    train()
alone, losses_alone = train_alone()
torch.testing.assert_close(losses, losses_alone)
with deepspeed.zero.GatheredParameters([*model.parameters()], enabled=stage == 3):
    weights = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
check_weights(weights, alone)
engine.save_checkpoint(os.environ["ECOSYSTEM_RESULTS"])
train()
engine.load_checkpoint(os.environ["ECOSYSTEM_RESULTS"])
with deepspeed.zero.GatheredParameters([*model.parameters()], enabled=stage == 3):
    weights = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
check_weights(weights, alone)
report(losses=losses, weights=[value.tolist() for value in weights.values()])
engine.destroy()
end_together()
