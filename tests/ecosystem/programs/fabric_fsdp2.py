"""Lightning Fabric with `ModelParallelStrategy`: FSDP2, clipped gradients, and a sharded checkpoint."""

import os

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from regression import BATCH, EPOCHS, RATE, check_weights, end_together, make_data, make_model, report, train_alone
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import asyncdist.torch_backend


def shard(model, mesh):
    """Shard each layer over the ranks of data parallelism."""
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return model


strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1, process_group_backend="asyncdist")
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
model = fabric.setup(make_model())
optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=RATE))
loader = fabric.setup_dataloaders(DataLoader(make_data(), batch_size=BATCH))
losses, norms = [], []
for _ in range(EPOCHS):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=100.0).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
alone, losses_alone = train_alone()
check_weights(whole, alone)
torch.testing.assert_close(losses, losses_alone)

path = f"{os.environ['ECOSYSTEM_RESULTS']}/sharded"
fabric.save(path, {"model": model, "optimizer": optimizer})
restored = fabric.setup(make_model())
fabric.load(path, {"model": restored, "optimizer": fabric.setup_optimizers(torch.optim.SGD(restored.parameters()))})
check_weights({name: value.full_tensor() for name, value in restored.state_dict().items()}, alone)
report(losses=losses, norms=norms, weights=[value.tolist() for value in whole.values()])
end_together()
