"""Measures communication hooks on two small models, and writes the tables of hooks in docs/ddp-compared.md.

    python tests/ddp/hook_tables.py             # bytes and accuracy: half an hour; any machine
    python tests/ddp/hook_tables.py --cost      # time and processor time: two minutes; an idle machine with two cores
    python tests/ddp/hook_tables.py --seeds 1 --models Digits --print     # prints a table, and leaves the page

*Accuracy:* two ranks train a network on handwritten digits, and a transformer of two layers that copies sequences, once
without a hook and once with each hook. A row has the bytes that a rank sends in the last step over those of an all-reduce
of all gradients, and the loss and the accuracy on held-out data after equal steps: mean, least and largest of the seeds.

*Cost:* two ranks of one host give gradients of 16 MiB, those of four matrices of 1024 x 1024, to the hooks in turns.
"""

import argparse
import statistics
import tempfile
import time

import torch
from torch import nn

from benchmarks.processes import Nursery


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


class Transformer(nn.Module):
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


KINDS = {"Digits": Digits, "Transformer": Transformer}
PATIENCE = 3600.0
WARM_UPS = 12
"""More than the steps in which `PowerSGD` sends gradients as they are."""


def hooks_by_name():
    """Return a function that makes each hook anew."""
    from asyncdist.ddp import hooks

    return {
        "none": lambda: None,
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

    def all_gather(self, outputs, tensor):
        self._sent.append(tensor.nbytes)
        return self._group.all_gather(outputs, tensor)


def train(group, kind, hook, seed):
    """Return the bytes of the last step over those of its gradients, the loss and the accuracy on held-out data."""
    from asyncdist.ddp import DistributedDataParallel

    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = DistributedDataParallel(kind(), process_group=group)
    sent = []

    async def counted(bucket, group):
        return await hook(bucket, Counting(group, sent))

    if hook is not None:
        model.register_async_comm_hook(counted)
    inputs, targets, trained = kind.data(generator)
    optimizer = kind.optimizer(model.parameters(), kind.rate)
    for _ in range(kind.steps):
        own = torch.randint(0, trained, (2, kind.batch), generator=generator)[group.rank()]
        sent.clear()
        optimizer.zero_grad()
        kind.loss(model(inputs[own]), targets[own]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        output = model.eval()(inputs[trained:])
        accuracy = (output.argmax(-1) == targets[trained:]).float().mean().item()
        held_out = kind.loss(output, targets[trained:]).item()
    all_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return sum(sent) / all_bytes if sent else 1.0, held_out, accuracy


def measure_accuracy(group, options):
    """Train every combination of a hook, a model and a seed, and yield the rows of the table."""
    for name, make in chosen(options):
        cells = [name]
        for kind in options.models:
            found = [train(group, KINDS[kind], make(), seed) for seed in range(options.seeds)]
            volumes, losses, accuracies = zip(*found, strict=True)
            percent = [100 * each for each in accuracies]
            cells += [f"{volumes[0]:.3f}", spread(losses, ".3f"), spread(percent, ".1f")]
        yield cells


def measure_cost(group, options):
    """Give the hooks the same gradients in turns, and yield the rows of the table.

    Waiting threads sleep (ASYNCDIST_SPIN_US=0), so that the processor time is that of the hook's work.
    """
    from asyncdist.ddp import DistributedDataParallel, hooks

    shapes = [nn.Linear(1024, 1024, bias=False) for _ in range(4)]
    mib = sum(layer.weight.nbytes for layer in shapes) / (1 << 20)
    inputs = torch.randn(8, 1024, generator=torch.Generator().manual_seed(group.rank()))
    models, times = {}, {}
    for name, make in chosen(options):
        # One bucket: the hook begins when nothing else computes.
        model = DistributedDataParallel(nn.Sequential(*shapes), process_group=group, bucket_cap_mb=1024)
        models[name], times[name] = model, []
        model.register_async_comm_hook(timed(make() or hooks.average, times[name]))
        shapes = [nn.Linear(1024, 1024, bias=False) for _ in range(4)]
    for turn in range(-WARM_UPS, options.steps):
        for model in models.values():
            model.zero_grad()
            loss = model(inputs).square().mean()
            group.barrier(background=False).wait()
            loss.backward()
        if turn < 0:
            [each.clear() for each in times.values()]
    for name, found in times.items():
        yield [name, *(f"{1e3 * statistics.median(each) / mib:.2f}" for each in zip(*found, strict=True))]


def chosen(options):
    """Return the hooks that are measured."""
    return [(name, make) for name, make in hooks_by_name().items() if options.hook in name]


def timed(hook, times):
    """Return a hook that appends the seconds and the seconds of processor time of each call to ``times``."""

    async def run(bucket, group):
        began, worked = time.perf_counter(), time.process_time()
        result = await hook(bucket, group)
        times.append((time.perf_counter() - began, time.process_time() - worked))
        return result

    return run


def spread(values, form):
    """Return the mean of the seeds, and the least and the largest."""
    return f"{statistics.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def measure(test, rank, where, options):
    """Measure on one of two ranks; rank 0 sends the rows of the table."""
    import asyncdist.sync as dist

    torch.set_num_threads(1)
    with dist.process_group(init_method=where, rank=rank, world_size=2) as group:
        for cells in (measure_cost if options.cost else measure_accuracy)(group, options):
            if rank == 0:
                test.send(cells)


def rows(options):
    """Run both ranks, and yield the rows of the table."""
    environment = {"ASYNCDIST_SPIN_US": "0"} if options.cost else {}
    with tempfile.TemporaryDirectory() as folder, Nursery(("asyncdist.sync", "asyncdist.ddp")) as nursery:
        where = f"file://{folder}/world"
        ranks = [nursery.start(__file__, "measure", rank, where, options, environment=environment) for rank in range(2)]
        for _ in chosen(options):
            yield ranks[0].hear(PATIENCE)
        for rank in ranks:
            rank.wait()


def header(options):
    """Return the first two lines of the table."""
    if options.cost:
        columns = ["ms / MiB", "processor ms / MiB"]
    else:
        columns = [f"{kind.lower()}: {each}" for kind in options.models for each in ("bytes", "loss", "accuracy %")]
    return f"| hook | {' | '.join(columns)} |\n|---|{'--:|' * len(columns)}\n"


def main():
    """Make the table, and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", action="store_true", help="measure times instead of accuracy")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the accuracy (default 5)")
    parser.add_argument("--models", nargs="+", choices=list(KINDS), default=list(KINDS), help="models of the accuracy")
    parser.add_argument("--hook", default="", help="only hooks with this word in their names; needs --print")
    parser.add_argument("--steps", type=int, default=40, help="measured steps of the cost (default 40)")
    parser.add_argument("--print", action="store_true", help="leave the page as it is")
    options = parser.parse_args()
    if options.hook and not options.print:
        parser.error("--hook needs --print: the page's table has all hooks")
    made = header(options)
    print(made, end="")
    for cells in rows(options):
        made += f"| {' | '.join(cells)} |\n"
        print(made.splitlines()[-1], flush=True)
    if not options.print:
        from table import write_into_page

        write_into_page("costs of hooks" if options.cost else "hooks", made)


if __name__ == "__main__":
    main()
