"""Lightning's Trainer with DDP and its own launcher: averages of integers, validation, callbacks, a checkpoint, metrics."""

import os

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from regression import BATCH, EPOCHS, RATE, check_weights, make_data, make_model, report, train_alone
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics.regression import MeanSquaredError

import asyncdist.torch_backend


class Regression(lightning.LightningModule):
    """Logs in every way that communicates."""

    def __init__(self):
        super().__init__()
        self.model = make_model()
        self.error = MeanSquaredError()

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=True)
        integer = torch.tensor(2 * index + 3 * self.global_rank)
        self.log("samples", integer, sync_dist=True, on_epoch=True, reduce_fx="sum")
        self.log("integer", integer, sync_dist=True, on_epoch=True)
        # Lightning averages the numbers of samples as int64: here 4 and 5.
        self.log("weighted", loss, sync_dist=True, on_epoch=True, batch_size=1 + (index == 0) * self.global_rank)
        self.log("largest", integer, sync_dist=True, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch, index):
        inputs, targets = batch
        outputs = self.model(inputs)
        self.error(outputs, targets)
        self.log("error", self.error, on_epoch=True)
        self.log("validation", nn.functional.mse_loss(outputs, targets), sync_dist=True)
        self.log("count", torch.tensor(len(inputs)), sync_dist=True, on_epoch=True)

    def train_dataloader(self):
        # Lightning's own sampler shuffles.
        sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=BATCH, sampler=sampler)

    def val_dataloader(self):
        return DataLoader(data, batch_size=BATCH)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)

    def on_train_end(self):
        self.gathered = self.all_gather(torch.tensor([self.global_rank]))


lightning.seed_everything(0, verbose=False)
folder = os.environ["ECOSYSTEM_RESULTS"]
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend="asyncdist"),
    max_epochs=EPOCHS,
    default_root_dir=folder,
    callbacks=[ModelCheckpoint(folder, monitor="validation", save_last=True), EarlyStopping("validation")],
    logger=False,
    enable_progress_bar=False,
    log_every_n_steps=1,
)
module, data = Regression(), make_data()
trainer.fit(module)
check_weights(module.model.state_dict(), train_alone()[0])
logged = {name: value.item() for name, value in sorted(trainer.logged_metrics.items())}
callbacks = {name: value.item() for name, value in sorted(trainer.callback_metrics.items())}
validated = trainer.validate(module, verbose=False)
report(logged=logged, callbacks=callbacks, validated=validated, gathered=module.gathered)
