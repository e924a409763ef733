"""DeepSpeed: a pipeline of two stages, which send activations and gradients to each other."""

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from regression import BATCH, RATE, SAMPLES, end_together, make_data, make_model, report
from torch import nn

import asyncdist.torch_backend

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend="asyncdist")
torch.manual_seed(0)
layers = [LayerSpec(nn.Linear, 4, 8), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Linear, 8, 1)]
model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
config = {
    "train_batch_size": 4 * BATCH,
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}
engine, _, _, _ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE), config=config
)
inputs, targets = make_data().tensors
batches = [(inputs[batch], targets[batch]) for batch in torch.arange(SAMPLES).split(BATCH)]
losses = [engine.train_batch(iter(batches[first : first + 4])).item() for first in (0, 4, 0, 4)]
report(losses=losses, weights=[each.detach().tolist() for each in model.parameters()])
end_together()
