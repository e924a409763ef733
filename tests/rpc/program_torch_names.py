"""A program in the manner of torch's RPC tutorials. Its only difference between the two libraries is one import.

Rank 0 is an agent that lets observers run episodes, which call it back over its reference; then a parameter server that
updates in batches, with functions that return futures. It prints what it computes.
"""

import sys
import threading

import torch
import torch.multiprocessing as mp
from torch import nn

if sys.argv[1] == "torch":
    import torch.distributed.rpc as rpc
else:
    import asyncdist.rpc.blocking as rpc

WORLD = 3


def call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method, rref, *args, **kwargs):
    return rpc.rpc_sync(rref.owner(), call_method, args=[method, rref, *args], kwargs=kwargs)


class Observer:
    def __init__(self):
        self.id = rpc.get_worker_info().id

    def run_episode(self, agent, steps):
        state = torch.zeros(2)
        for _ in range(steps):
            action = remote_method(Agent.select_action, agent, self.id, state)
            state = state + action
            remote_method(Agent.report_reward, agent, self.id, float(state.sum()))


class Agent:
    def __init__(self):
        self.rref = rpc.RRef(self)
        self.rewards = {}
        self.observers = []
        for rank in range(1, WORLD):
            info = rpc.get_worker_info(f"worker{rank}")
            self.observers.append(rpc.remote(info, Observer))
            self.rewards[info.id] = []

    def select_action(self, observer, state):
        return torch.full((2,), float(observer))

    def report_reward(self, observer, reward):
        self.rewards[observer].append(reward)

    def run(self):
        episodes = [
            rpc.rpc_async(each.owner(), call_method, args=(Observer.run_episode, each, self.rref, 3))
            for each in self.observers
        ]
        for episode in episodes:
            episode.wait()
        return self.rewards


class BatchServer:
    def __init__(self, size):
        self.size = size
        self.model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.model.weight)
        self.lock = threading.Lock()
        self.future = torch.futures.Future()
        self.gradients = []

    def get_model(self):
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch(rref, gradient):
        self = rref.local_value()
        with self.lock:
            self.gradients.append(gradient)
            future = self.future
            if len(self.gradients) == self.size:
                with torch.no_grad():
                    self.model.weight -= 0.1 * torch.stack(self.gradients).sum(0)
                self.gradients, self.future = [], torch.futures.Future()
                future.set_result(self.model)
        return future


class Stage:
    """A stage of a pipeline, which takes references to its inputs."""

    def __init__(self, factor):
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, factor)

    def forward(self, inputs):
        with torch.no_grad():
            return self.layer(inputs.to_here())

    def parameter_rrefs(self):
        return [rpc.RRef(each) for each in self.layer.parameters()]


def optimizer_of(parameters):
    own = [each.to_here() for each in parameters]
    for each in own:
        each.grad = torch.ones_like(each)
    return torch.optim.SGD(own, lr=1.0)


def pipeline():
    first, second = rpc.remote("worker1", Stage, args=(2.0,)), rpc.remote("worker2", Stage, kwargs={"factor": 3.0})
    optimizer = rpc.remote("worker2", optimizer_of, args=(second.remote().parameter_rrefs().to_here(),))
    optimizer.rpc_sync().step()
    futures = []
    for part in torch.arange(4.0).reshape(4, 1).split(2):
        middle = first.remote().forward(rpc.RRef(part))
        futures.append(second.rpc_async().forward(middle))
    return torch.cat(torch.futures.collect_all(futures).then(lambda done: [each.wait() for each in done.wait()]).wait())


def train(server, rank):
    model = server.rpc_sync().get_model()
    for _ in range(3):
        model(torch.full((1, 2), float(rank))).sum().backward()
        model = rpc.rpc_sync(server.owner(), BatchServer.update_and_fetch, args=(server, model.weight.grad))
    return model.weight.detach()


def fail(text):
    raise ValueError(text)


def run_worker(rank, port):
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORLD, rpc_backend_options=options)
    if rank == 0:
        print("rewards", Agent().run())
        print("sum", rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3)))
        server = rpc.remote("worker1", BatchServer, args=(2,))
        trained = [rpc.rpc_async(f"worker{each}", train, args=(server, each)) for each in (1, 2)]
        print("weights", torch.futures.wait_all(trained))
        print("pipeline", pipeline().flatten().tolist())
        print("size", rpc.remote("worker2", torch.add, args=(torch.ones(5), 1)).remote().mul(2).to_here())
        then = rpc.rpc_async("worker2", max, args=(1, 2)).then(lambda done: done.wait() + 1)
        print("then", then.wait(), rpc.RRef(7).to_here(), rpc.RRef(7).is_owner())
        try:
            rpc.rpc_sync("worker1", fail, args=("no such thing",))
        except ValueError as error:
            print("error", "no such thing" in str(error))
        print("info", rpc.get_worker_info().name, rpc.get_worker_info("worker2").id)
    rpc.shutdown()


if __name__ == "__main__":
    # The workers are forked, so that each of them has imported torch.
    mp.start_processes(run_worker, args=(int(sys.argv[2]),), nprocs=WORLD, join=True, start_method="fork")
