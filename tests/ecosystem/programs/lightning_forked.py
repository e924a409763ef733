"""Lightning's Trainer with processes that it forks, as in a notebook."""

import os

import lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from regression import report

import asyncdist.torch_backend


class Reporting(BoringModel):
    """Logs one number per step, and reports the weights."""

    def training_step(self, batch, index):
        result = super().training_step(batch, index)
        self.log("loss", result["loss"], sync_dist=True)
        return result

    def on_train_end(self):
        logged = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        report(logged=logged, weight=self.layer.weight.detach())


lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(start_method="fork", process_group_backend="asyncdist"),
    max_steps=4,
    limit_val_batches=2,
    default_root_dir=os.environ["ECOSYSTEM_RESULTS"],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Reporting())
