"""Accelerate: DDP's communication hooks, which compress the gradients."""

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from regression import make_data, make_model, report
from torch import nn

import asyncdist.torch_backend

torch.distributed.init_process_group("asyncdist")
Hook = DDPCommunicationHookType
gradients = {}
for hook, wrapper in [
    (Hook.NO, Hook.NO), (Hook.FP16, Hook.NO), (Hook.POWER_SGD, Hook.NO),
    (Hook.POWER_SGD, Hook.FP16), (Hook.BATCHED_POWER_SGD, Hook.NO), (Hook.BATCHED_POWER_SGD, Hook.FP16),
]:  # fmt: skip
    torch.manual_seed(4)
    # Compress from the third step on. torch's batched hook would raise AssertionError then, also on gloo.
    options = {"start_powerSGD_iter": 2} if hook is Hook.POWER_SGD else {}
    handler = DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper, comm_state_option=options)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model = accelerator.prepare(make_model())
    inputs, targets = make_data()[accelerator.process_index :: 2]
    for _ in range(5):
        model.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
    gradients[f"{hook}, {wrapper}"] = model.module[0].weight.grad.tolist()
report(**gradients)
accelerator.end_training()
