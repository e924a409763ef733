"""Lightning Fabric with DDP: training with accumulated gradients, its collectives, a checkpoint."""

import os

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from regression import BATCH, EPOCHS, RATE, check_weights, end_together, make_data, make_model, report, train_alone
from torch import nn
from torch.utils.data import DataLoader

import asyncdist.torch_backend

fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="asyncdist"))
fabric.launch()
model = make_model()
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=RATE))
loader = fabric.setup_dataloaders(DataLoader(make_data(), batch_size=BATCH))
losses = []
for _ in range(EPOCHS):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
alone, losses_alone = train_alone()
check_weights(model.state_dict(), alone)
torch.testing.assert_close(losses, losses_alone)

rank = fabric.global_rank
path = f"{os.environ['ECOSYSTEM_RESULTS']}/first"
with fabric.rank_zero_first():
    first = os.path.exists(path)
    open(path, "w").close()
objects = fabric.broadcast({"from": rank})
integer = fabric.all_reduce(torch.tensor(2 * rank + 1), reduce_op="mean")
odd = fabric.all_reduce(torch.tensor(rank), reduce_op="mean")
gathered = fabric.all_gather({"rank": torch.tensor([rank, rank])})["rank"]
path = f"{os.environ['ECOSYSTEM_RESULTS']}/fabric.ckpt"
fabric.save(path, {"model": model, "optimizer": optimizer})
fabric.barrier()
restored = {"model": fabric.setup_module(make_model())}
fabric.load(path, restored, strict=False)
check_weights(restored["model"].state_dict(), alone)

model.zero_grad()
for step, (inputs, targets) in enumerate(loader):
    with fabric.no_backward_sync(model, enabled=step % 2 == 0):
        fabric.backward(nn.functional.mse_loss(model(inputs), targets))
gradient = model.module[0].weight.grad
report(
    losses=losses, first=first, objects=objects, integer=integer, odd=odd, gathered=gathered, accumulated=gradient,
)  # fmt: skip
end_together()
