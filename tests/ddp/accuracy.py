"""Measures what communication hooks send, cost and change, on two small models, for docs/ddp.md.

    python tests/ddp/accuracy.py              # both models, three seeds
    python tests/ddp/accuracy.py Copier 1     # one of them, with one seed

Two ranks train a network on handwritten digits, and a transformer of two layers that copies sequences, once without a
hook and once with each hook. The program prints a table: the bytes that a rank sends in the last step over those of an
all-reduce of all gradients, the processor time of the hook for a million gradients (milliseconds, median of the steps),
and the loss and the accuracy on held-out data after equal steps.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time

import torch
from torch import nn


class Digits(nn.Module):
    """A network of 0.3 M parameters for 8 x 8 images."""

    steps, rate, batch = 150, 0.1, 32

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )

    def forward(self, x):
        return self.layers(x)

    @staticmethod
    def optimizer(parameters, rate):
        return torch.optim.SGD(parameters, rate, momentum=0.9)

    @staticmethod
    def data(generator):
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32) / 16
        order = torch.randperm(len(images), generator=generator)
        return images[order], torch.tensor(digits.target)[order], 1437

    @staticmethod
    def loss(output, target):
        return nn.functional.cross_entropy(output, target)


class Copier(nn.Module):
    """A transformer of 0.4 M parameters that repeats the first half of a sequence of 24 of 16 symbols."""

    steps, rate, batch = 250, 0.003, 32

    def __init__(self):
        super().__init__()
        self.symbols, self.places = nn.Embedding(17, 128), nn.Parameter(torch.randn(24, 128) / 10)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(128, 16)

    def forward(self, x):
        return self.head(self.layers(self.symbols(x) + self.places))[:, 12:]

    @staticmethod
    def optimizer(parameters, rate):
        return torch.optim.Adam(parameters, rate)

    @staticmethod
    def data(generator):
        sequences = torch.randint(0, 16, (4096, 12), generator=generator)
        return torch.cat([sequences, torch.full_like(sequences, 16)], 1), sequences, 3584

    @staticmethod
    def loss(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def hooks_by_name():
    """Return a function that makes each hook anew."""
    from asyncdist.ddp import hooks

    return {
        "none": lambda: None,
        "`average`": lambda: hooks.average,
        "`bf16`": lambda: hooks.bf16,
        "`fp16`": lambda: hooks.fp16,
        '`Quantized("int8")`': lambda: hooks.Quantized("int8"),
        '`Quantized("int4")`': lambda: hooks.Quantized("int4"),
        "`PowerSGD(rank=4)`": lambda: hooks.PowerSGD(rank=4),
        "`PowerSGD(rank=1)`": lambda: hooks.PowerSGD(rank=1),
        "`TopK(0.05)`": lambda: hooks.TopK(0.05),
        "`TopK(0.01)`": lambda: hooks.TopK(0.01),
    }


class Counting:
    """A group of two ranks that counts the bytes that this rank sends."""

    def __init__(self, group, sent):
        self._group, self._sent = group, sent

    def __getattr__(self, name):
        return getattr(self._group, name)

    def all_reduce(self, tensor, *how):
        # 2 (P - 1) / P of the tensor, and P is 2.
        self._sent.append(tensor.nbytes)
        return self._group.all_reduce(tensor, *how)

    def all_gather_single(self, output, tensor):
        self._sent.append(tensor.nbytes)
        return self._group.all_gather_single(output, tensor)

    def all_to_all_single(self, output, tensor):
        self._sent.append(tensor.nbytes // 2)
        return self._group.all_to_all_single(output, tensor)


def train(group, kind, hook, seed):
    """Return the bytes of the last step, the loss, the accuracy, and the seconds of the hook for a million gradients."""
    from asyncdist.ddp import DistributedDataParallel

    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = DistributedDataParallel(kind(), process_group=group)
    sent, spent, by_step = [], [], []

    async def counted(bucket, group):
        began = time.thread_time()
        result = await hook(bucket, Counting(group, sent))
        spent.append(time.thread_time() - began)
        return result

    if hook is not None:
        model.register_async_comm_hook(counted)
    inputs, targets, trained = kind.data(generator)
    optimizer = kind.optimizer(model.parameters(), kind.rate)
    for _ in range(kind.steps):
        own = torch.randint(0, trained, (2, kind.batch), generator=generator)[group.rank()]
        sent.clear()
        spent.clear()
        optimizer.zero_grad()
        kind.loss(model(inputs[own]), targets[own]).backward()
        by_step.append(sum(spent))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        output = model.eval()(inputs[trained:])
        accuracy = (output.argmax(-1) == targets[trained:]).float().mean().item()
        held_out = kind.loss(output, targets[trained:]).item()
    all_bytes = sum(parameter.nbytes for parameter in model.parameters())
    cost = statistics.median(by_step) / (all_bytes / 4e6)
    return sum(sent) / all_bytes if sent else 1.0, held_out, accuracy, cost


def rank_main(rank, where, results, kinds, seeds):
    """Train every combination."""
    import asyncdist.sync as dist

    torch.set_num_threads(1)
    with dist.process_group(init_method=where, rank=rank, world_size=2) as group:
        for kind in kinds:
            for name, make in hooks_by_name().items():
                found = [train(group, kind, make(), seed) for seed in range(seeds)]
                if rank == 0:
                    results.put((kind.__name__, name, [*zip(*found, strict=True)]))


def main() -> None:
    """Run both ranks, and print the table."""
    kinds = [kind for kind in (Digits, Copier) if kind.__name__ in sys.argv or len(sys.argv) == 1]
    seeds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(rank, f"file://{folder}/{os.getpid()}", results, kinds, seeds))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        print("| model | hook | bytes | ms | loss | accuracy |\n|---|---|--:|--:|--:|--:|")
        for _ in range(len(kinds) * len(hooks_by_name())):
            kind, name, (volumes, losses, accuracies, costs) = results.get()
            spread = f"{statistics.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
            cells = [kind, name, f"{volumes[0]:.3f}", f"{1e3 * statistics.median(costs):.1f}", spread]
            print(f"| {' | '.join(cells)} | {100 * statistics.mean(accuracies):.1f} % |", flush=True)
        for rank in ranks:
            rank.join()


if __name__ == "__main__":
    main()
