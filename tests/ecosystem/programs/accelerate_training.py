"""Accelerate: training, the collectives of `Accelerator`, gradient accumulation, and a saved and loaded state."""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, pad_across_processes
from regression import BATCH, EPOCHS, RATE, check_weights, make_data, make_model, report, train_alone
from torch import nn
from torch.utils.data import DataLoader

import asyncdist.torch_backend

torch.distributed.init_process_group("asyncdist")  # the first Accelerator uses this group
accelerator = Accelerator(cpu=True)

model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(make_data(), batch_size=BATCH))
losses, counted = [], 0
for _ in range(EPOCHS):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        counted += len(accelerator.gather_for_metrics(targets))
alone, losses_alone = train_alone()
check_weights(accelerator.unwrap_model(model).state_dict(), alone)
torch.testing.assert_close(losses, losses_alone)

rank = accelerator.process_index
objects = broadcast_object_list([{"from": rank}])
padded = accelerator.gather(pad_across_processes(torch.full((rank + 1, 2), rank), pad_index=-1))
total = accelerator.reduce(torch.tensor([rank + 2]), "sum")
with tempfile.TemporaryDirectory() as folder:
    path = broadcast_object_list([folder])[0]
    accelerator.save_state(path)
    accelerator.wait_for_everyone()
    with torch.no_grad():
        model.module[0].weight.zero_()
    accelerator.load_state(path)
    accelerator.wait_for_everyone()
check_weights(accelerator.unwrap_model(model).state_dict(), alone)

accumulating = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = make_model()
model, optimizer = accumulating.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
for inputs, targets in loader:
    with accumulating.accumulate(model):
        accumulating.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
report(
    losses=losses, counted=counted, objects=objects, padded=padded, total=total,
    accumulated=model.module[0].weight.detach(),
)  # fmt: skip
accelerator.end_training()
