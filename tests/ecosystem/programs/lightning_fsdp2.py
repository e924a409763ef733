"""Lightning's Trainer with `ModelParallelStrategy`: FSDP2, a sharded and a whole checkpoint, and loading it."""

import os

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from regression import BATCH, EPOCHS, RATE, check_weights, end_together, make_data, make_model, report, train_alone
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import asyncdist.torch_backend


class Regression(lightning.LightningModule):
    """Shards its layers."""

    def __init__(self):
        super().__init__()
        self.model = make_model()

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=mesh)

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=True)
        return loss

    def train_dataloader(self):
        # Lightning's own sampler shuffles.
        sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=BATCH, sampler=sampler)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


folder = os.environ["ECOSYSTEM_RESULTS"]
module, data = Regression(), make_data()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=ModelParallelStrategy(
        data_parallel_size=2,
        tensor_parallel_size=1,
        process_group_backend="asyncdist",
        save_distributed_checkpoint=False,
    ),
    max_epochs=EPOCHS,
    default_root_dir=folder,
    logger=False,
    enable_progress_bar=False,
    enable_checkpointing=False,
    log_every_n_steps=1,
)
trainer.fit(module)
whole = {name: value.full_tensor() for name, value in module.model.state_dict().items()}
check_weights(whole, train_alone()[0])
trainer.save_checkpoint(f"{folder}/whole.ckpt")
trainer.strategy.barrier()
saved = torch.load(f"{folder}/whole.ckpt", weights_only=True)["state_dict"]
torch.testing.assert_close([*saved.values()], [*whole.values()])
report(loss=trainer.callback_metrics["loss_epoch"], weights=[value.tolist() for value in whole.values()])
end_together()
