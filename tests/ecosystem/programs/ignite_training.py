"""Ignite: `initialize` with the name of the back end, `auto_model`, `auto_dataloader`, metrics, and collectives."""

import ignite.distributed as idist
import torch
from ignite.distributed.comp_models import native
from ignite.engine import Engine, Events
from ignite.metrics import MeanSquaredError, RunningAverage
from regression import BATCH, EPOCHS, RATE, check_weights, make_data, make_model, report, train_alone
from torch import nn

import asyncdist.torch_backend

native.MPI = "asyncdist"  # in Ignite's list of three back ends, this takes the place of one that torch's wheels lack
native._NativeDistModel.available_backends += (native.MPI,)
idist.initialize("asyncdist")

rank = idist.get_rank()
data = make_data()
# auto_dataloader divides the batch size by the number of ranks, and samples in order with this sampler.
sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
model = idist.auto_model(make_model())
optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=RATE))


def step(engine, batch):
    """Train on one batch."""
    inputs, targets = batch
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


losses = []
trainer = Engine(step)
RunningAverage(output_transform=lambda loss: loss).attach(trainer, "average")


@trainer.on(Events.ITERATION_COMPLETED)
def keep_mean(engine):
    """Keep the mean loss of both ranks."""
    losses.append(idist.all_reduce(engine.state.output) / 2)


trainer.run(loader, max_epochs=EPOCHS)
alone, losses_alone = train_alone()
check_weights(model.module.state_dict(), alone)
torch.testing.assert_close(losses, losses_alone)

evaluator = Engine(lambda engine, batch: (model(batch[0]), batch[1]))
MeanSquaredError().attach(evaluator, "error")
error = evaluator.run(idist.auto_dataloader(data, batch_size=2 * BATCH)).metrics["error"]
torch.testing.assert_close(error, nn.functional.mse_loss(alone(data.tensors[0]), data.tensors[1]).item())
text = idist.broadcast("from rank 1" if rank == 1 else None, src=1, safe_mode=True)
tensors = idist.all_gather(torch.arange(2) + rank)
objects = idist.all_gather({"rank": rank})
texts = idist.all_gather(f"rank {rank}")
largest = idist.all_reduce(rank + 1.5, op="MAX")
shapes = [list(t.shape) for t in idist.all_gather_tensors_with_shapes(torch.ones(rank + 1, 2), [[1, 2], [2, 2]])]
with idist.one_rank_first():
    pass
idist.barrier()
report(
    losses=losses, error=error, average=trainer.state.metrics["average"], text=text, tensors=tensors, objects=objects,
    texts=texts, largest=largest, shapes=shapes, per_node=idist.get_nproc_per_node(), nodes=idist.get_nnodes(),
)  # fmt: skip
idist.finalize()
