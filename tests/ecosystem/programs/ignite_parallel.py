"""Ignite's own launcher: `idist.Parallel` starts two processes, which import this module again."""

import ignite.distributed as idist
import torch
from ignite.distributed.comp_models import native
from regression import report

import asyncdist.torch_backend

native.MPI = "asyncdist"  # in Ignite's list of three back ends, this takes the place of one that torch's wheels lack
native._NativeDistModel.available_backends += (native.MPI,)


def train(local_rank: int) -> None:
    """Average the gradient of one linear layer."""
    model = idist.auto_model(torch.nn.Linear(2, 1, bias=False))
    model(torch.tensor([[1.0, 2.0]]) * (local_rank + 1)).sum().backward()
    gradient = model.module.weight.grad
    torch.testing.assert_close(gradient, torch.tensor([[1.5, 3.0]]))
    report(gradient=gradient, sizes=[idist.get_world_size(), idist.get_nproc_per_node()])


if __name__ == "__main__":
    with idist.Parallel(backend="asyncdist", nproc_per_node=2) as parallel:
        parallel.run(train)
