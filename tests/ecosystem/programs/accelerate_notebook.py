"""Accelerate's `notebook_launcher`, which forks two processes."""

import torch
from accelerate import Accelerator, notebook_launcher
from regression import BATCH, make_data, make_model, report
from torch import nn
from torch.utils.data import DataLoader

import asyncdist.torch_backend


def train() -> None:
    """Compute the gradients of one epoch."""
    torch.distributed.init_process_group("asyncdist")
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(make_model(), DataLoader(make_data(), batch_size=BATCH))
    for inputs, targets in loader:
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
    report(gradient=model.module[0].weight.grad, gathered=accelerator.gather(torch.tensor([accelerator.process_index])))
    accelerator.end_training()


if __name__ == "__main__":
    notebook_launcher(train, (), num_processes=2)
