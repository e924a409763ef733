"""torch's RPC together with asyncdist groups: trainers use DDP, and a parameter server holds the embeddings."""

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

import asyncdist.torch_backend  # noqa: F401

TRAINERS = 2
ROWS, WIDTH = 10, 4


def train(test, url, rank):
    """Train with a parameter server, the last rank; send the weights of both parts after two steps."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"{url}/rpc", rpc_timeout=30)
    name = "server" if rank == TRAINERS else f"trainer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=TRAINERS + 1, rpc_backend_options=options)
    if rank < TRAINERS:
        dist.init_process_group("asyncdist", init_method=f"{url}/trainers", rank=rank, world_size=TRAINERS)
        test.send(_steps(rank))
        dist.destroy_process_group()
    rpc.shutdown()


def _steps(rank):
    rows = torch.arange(float(ROWS)).unsqueeze(1).expand(ROWS, WIDTH).clone()  # row r is full of r
    options = {"mode": "sum", "_weight": rows}
    embeddings = rpc.remote("server", torch.nn.EmbeddingBag, (ROWS, WIDTH), options)
    layer = torch.nn.Linear(WIDTH, 1)
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    head = DistributedDataParallel(layer)
    parameters = [embeddings.remote().get_parameter("weight"), *map(rpc.RRef, head.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.5)
    words = torch.arange(rank, ROWS, TRAINERS).view(1, -1)
    for _ in range(2):
        with dist_autograd.context() as context:
            loss = head(embeddings.rpc_sync().forward(words)).sum()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
    trained = embeddings.rpc_sync().forward(torch.arange(ROWS).view(-1, 1)).detach()
    return layer.weight.detach().flatten().tolist(), layer.bias.item(), trained[:, 0].tolist()
