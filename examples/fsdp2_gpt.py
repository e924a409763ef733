"""Train a small transformer on English text with FSDP2, and resume from its checkpoint on another number of ranks.

    torchrun --nproc-per-node=2 examples/fsdp2_gpt.py               # trains for about a minute and saves a checkpoint
    torchrun --nproc-per-node=3 examples/fsdp2_gpt.py --resume      # resumes, here on three ranks
    python examples/fsdp2_gpt.py --resume                           # resumes in one process, without a launcher

    torchrun --nproc-per-node=2 examples/fsdp2_gpt.py --backend gloo    # the same over gloo, to compare

Only the name of the back end is asyncdist's; the rest is stock torch. `fully_shard` (FSDP2) gives each rank a shard of
every parameter, its gradient and its optimizer state. Just before a block computes, its parameters are gathered in
bfloat16. Its gradients are reduced in float32, and each rank updates its shard. torch.distributed.checkpoint saves the
shards and loads them on any number of ranks.

The text is the language reference that Python's help() prints: 370 KiB of English that come with every Python. The model
reads and writes single characters. The batch of a step depends only on the step's number, so a resumed run continues with
the same batches. At the end rank 0 prints a table and a text that the model has written, and plots the loss in
out/fsdp2_gpt/loss.png.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import asyncdist.torch_backend  # noqa: F401  # registers the back end "asyncdist"

arguments = argparse.ArgumentParser(
    description="Train a small transformer with FSDP2; see the first lines of this file."
)
arguments.add_argument("--backend", default="asyncdist", help="back end of torch.distributed, for example gloo")
arguments.add_argument("--resume", action="store_true", help="resume from the checkpoint in --out")
arguments.add_argument("--steps", type=int, default=400, help="number of steps in this run")
arguments.add_argument("--batch", type=int, default=24, help="sequences per step on all ranks together")
arguments.add_argument("--context", type=int, default=64, help="characters per sequence")
arguments.add_argument("--width", type=int, default=128, help="features per character")
arguments.add_argument("--layers", type=int, default=4)
arguments.add_argument("--heads", type=int, default=4)
arguments.add_argument("--lr", type=float, default=4e-3, help="learning rate after the warm-up")
arguments.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the batches")
arguments.add_argument("--out", type=Path, default=Path("out/fsdp2_gpt"), help="folder of the checkpoint and the plot")

WARMUP = 40  # steps during which the learning rate rises
CHARACTERS = 128  # ASCII


# -- the text ---------------------------------------------------------------------------------------


def read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training text and the held-out text, as character codes."""
    # Topics quote each other. Without duplicates no paragraph is in both texts.
    paragraphs = list(dict.fromkeys(part for name in sorted(topics) for part in topics[name].split("\n\n")))
    held_out = paragraphs[::10]
    del paragraphs[::10]
    training, test = ("\n\n".join(each).encode("ascii", "replace") for each in (paragraphs, held_out))
    return torch.tensor(list(training)), torch.tensor(list(test))


def batch_of(text: torch.Tensor, count: int, context: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``count`` random pieces of the text, and for each character the next one."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(len(text) - context, (count, 1), generator=generator) + torch.arange(context)
    return text[positions], text[positions + 1]


# -- the model: independent of the ranks ------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_before_attention, self.norm_before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        split = self.query_key_value(self.norm_before_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each: sequence, head, position, feature
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.mlp(self.norm_before_mlp(x))
        return out


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)
        # Attention biases that grow with distance (ALiBi) replace learned position embeddings: Press et al., "Train
        # short, test long" (2022).
        self.slopes = 2.0 ** (1 - 8 * torch.arange(heads) / heads)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        position = torch.arange(characters.shape[1])
        distance = position[:, None] - position
        bias = torch.where(distance >= 0, -self.slopes[:, None, None] * distance, -torch.inf)
        x = self.characters(characters)
        for block in self.blocks:
            x = block(x, bias.to(x.dtype))
        logits: torch.Tensor = self.head(self.norm(x)).float()  # the loss is computed in float32
        return logits


def model_of(options: argparse.Namespace) -> GPT:
    torch.manual_seed(options.seed)  # every rank makes the same weights; fully_shard keeps this rank's shard
    return GPT(options.width, options.layers, options.heads)


def shard(model: GPT, mesh: DeviceMesh) -> GPT:
    """Shard every parameter over the ranks: each block for itself, then the remaining parameters together."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


# -- a run ------------------------------------------------------------------------------------------


@dataclass
class History:
    """The losses and runs that the checkpoint contains besides model and optimizer."""

    losses: list[float] = field(default_factory=list)  # of each step
    tests: list[tuple[int, float]] = field(default_factory=list)  # number of steps before it, loss on held-out text
    runs: list[tuple[int, int]] = field(default_factory=list)  # first step, number of ranks


class Trainer:
    """A sharded model with its optimizer, on the ranks of ``mesh``."""

    def __init__(self, options: argparse.Namespace, mesh: DeviceMesh) -> None:
        self.options, self.rank, self.ranks = options, mesh.get_local_rank(), mesh.size()
        self.group = mesh.get_group()
        self.model = shard(model_of(options), mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, betas=(0.9, 0.98))
        self.shape = {name: getattr(options, name) for name in ("width", "layers", "heads")}
        self.text, self.held_out = read_text()
        self.history = History()

    def loss_of(self, text: torch.Tensor, count: int, seed: int) -> torch.Tensor:
        """Return the loss on this rank's share of a batch; all ranks draw the same batch."""
        inputs, targets = batch_of(text, count, self.options.context, seed)
        mine = slice(self.rank, None, self.ranks)
        logits = self.model(inputs[mine])
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets[mine].flatten())

    def mean_over_ranks(self, loss: torch.Tensor) -> float:
        mean = loss.detach() / self.ranks
        dist.all_reduce(mean, group=self.group)
        return mean.item()

    def step(self) -> float:
        """Train one step; return the loss on its whole batch."""
        number = len(self.history.losses)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.options.lr * min(1.0, (number + 1) / WARMUP)
        loss = self.loss_of(self.text, self.options.batch, seed=1_000_003 * self.options.seed + number)
        self.optimizer.zero_grad()
        loss.backward()  # gathers the parameters of each block again and reduce-scatters its gradients
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # by the norm over the shards of all ranks
        self.optimizer.step()
        self.history.losses.append(self.mean_over_ranks(loss))
        return self.history.losses[-1]

    def test(self) -> float:
        """Return the loss on held-out text; it does not depend on the number of ranks."""
        with torch.no_grad():
            return self.mean_over_ranks(self.loss_of(self.held_out, 4 * self.options.batch, seed=0))

    # -- the checkpoint: each rank writes its shards; any number of ranks reads them

    def save(self, folder: Path) -> None:
        """Write a new checkpoint, and replace the old one when all ranks have written theirs."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"shape": self.shape, "model": model, "optimizer": optimizer, "history": vars(self.history)}
        new = folder.with_suffix(".new")
        save(state, checkpoint_id=new)  # returns when every rank has written
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)

    def load(self, folder: Path) -> None:
        """Load a checkpoint that any number of ranks has saved."""
        saved = {"shape": dict(self.shape)}
        load(saved, checkpoint_id=folder)
        for name, value in saved["shape"].items():
            if value != self.shape[name]:
                sys.exit(f"--{name} {self.shape[name]}: the model in {folder} has {value}; pass that, or another --out")
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "history": vars(History())}
        load(state, checkpoint_id=folder)  # writes into this rank's shards, and replaces all other values
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.history = History(**state["history"])


def step_alone(options: argparse.Namespace, steps: int = 12) -> float:
    """Return the median seconds of a step without communication, with as many sequences per rank.

    All ranks measure at the same time, each in a mesh of its own, so that cores and caches are as busy as before.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ranks", "alone"))
    share = argparse.Namespace(**{**vars(options), "batch": options.batch // dist.get_world_size()})
    trainer = Trainer(share, mesh["alone"])
    return statistics.median([seconds_of(trainer) for _ in range(steps + 2)][2:])


def seconds_of(trainer: Trainer) -> float:
    started = perf_counter()
    trainer.step()
    return perf_counter() - started


# -- the output --------------------------------------------------------------------------------------


@contextmanager
def progress_of(steps: int, console: Console) -> Iterator[tuple[Progress, TaskID]]:
    """Show a progress bar on rank 0's terminal."""
    bar = Progress(
        TextColumn("[bold]step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=36),
        TextColumn("loss [cyan]{task.fields[loss]:.3f}[/]  [green]{task.fields[speed]:,.0f}[/] characters/s"),
        TimeElapsedColumn(),
        console=console,
        disable=dist.get_rank() != 0 or not console.is_terminal,
    )
    with bar:
        yield bar, bar.add_task("training", total=steps, loss=0.0, speed=0.0)


def train(trainer: Trainer, console: Console) -> list[float]:
    """Train the steps of this run; return the seconds of each."""
    options, seconds = trainer.options, []
    every = max(1, options.steps // 10)
    with progress_of(options.steps, console) as (bar, task):
        for number in range(1, options.steps + 1):
            seconds.append(seconds_of(trainer))
            loss = statistics.fmean(trainer.history.losses[-20:])
            speed = options.batch * options.context / statistics.median(seconds[-20:])
            bar.update(task, advance=1, loss=loss, speed=speed)
            if dist.get_rank() == 0 and not console.is_terminal and number % every == 0:
                print(f"step {len(trainer.history.losses):5d}  loss {loss:.3f}  {speed:,.0f} characters/s", flush=True)
    return seconds


def sample(model: GPT, context: int, length: int = 400) -> str:
    """Return a text that the model writes, character by character."""
    generator = torch.Generator().manual_seed(7)
    written = torch.tensor(list(b"The "))
    with torch.no_grad():
        for _ in range(length):
            probabilities = (model(written[-context:].unsqueeze(0))[0, -1] / 0.7).softmax(dim=0)
            written = torch.cat([written, torch.multinomial(probabilities, 1, generator=generator)])
    return bytes(written.tolist()).decode("ascii")


def report(trainer: Trainer, seconds: list[float], alone: float, table: Table, console: Console) -> None:
    """Print the times and losses of this run."""
    history, step, (own, total) = trainer.history, statistics.median(seconds), state_sizes(trainer)
    characters = trainer.options.batch * trainer.options.context
    table.add_row("parameters", f"{sum(each.numel() for each in trainer.model.parameters()):,}")
    table.add_row("parameters and optimizer state on rank 0", f"{own:.1f} of {total:.1f} MiB")
    table.add_row("steps", f"{len(seconds)}, the last is number {len(history.losses)}")
    table.add_row("characters per second", f"{characters / step:,.0f}")
    table.add_row("median step", f"{1000 * step:.1f} ms")
    table.add_row("without communication", f"{1000 * alone:.1f} ms: {max(0.0, 1 - alone / step):.0%} less")
    table.add_row("loss on held-out text, before", f"{history.tests[-2][1]:.3f}")
    table.add_row("loss on held-out text, after", f"{history.tests[-1][1]:.3f}")
    console.print(table)


def draw(history: History, path: Path) -> None:
    """Plot the losses of all runs."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    steps = range(1, len(history.losses) + 1)
    smooth = [statistics.fmean(history.losses[max(0, step - 20) : step]) for step in steps]
    axes.plot(steps, history.losses, color="#9ecae1", linewidth=0.8, label="each step")
    axes.plot(steps, smooth, color="#08519c", linewidth=2, label="mean of 20 steps")
    axes.plot(*zip(*history.tests, strict=True), "o", color="#d94801", label="held-out text")
    for first, ranks in history.runs:
        axes.axvline(first, color="0.6", linestyle=":")
        axes.annotate(f" {ranks} rank{'s' * (ranks > 1)}", (first, 0.97), xycoords=("data", "axes fraction"), va="top")
    axes.set(xlabel="step", ylabel="cross-entropy, nats per character", xlim=(0, None))
    axes.set_title("A small transformer learns English, sharded with FSDP2", loc="left", weight="bold")
    axes.legend(frameon=False, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def state_sizes(trainer: Trainer) -> tuple[float, float]:
    """Return the MiB of parameters and optimizer state that this rank holds, and those of all ranks."""
    state = [value for values in trainer.optimizer.state.values() for value in values.values()]
    tensors = [each for each in [*trainer.model.parameters(), *state] if isinstance(each, DTensor)]
    return sum(each.to_local().nbytes for each in tensors) / 2**20, sum(each.nbytes for each in tensors) / 2**20


# -- main --------------------------------------------------------------------------------------------


def start(backend: str) -> None:
    """Join the other ranks; without a launcher, make a world of one rank."""
    torch.set_num_threads(1)  # the ranks share the cores of this machine
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)


def check(options: argparse.Namespace) -> None:
    """Exit with advice if the arguments are impossible."""
    for name in ("steps", "batch", "context", "width", "layers", "heads"):
        if getattr(options, name) < 1:
            arguments.error(f"--{name} {getattr(options, name)}: must be at least 1")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if options.batch % ranks:
        sys.exit(f"{ranks} ranks cannot share a batch of {options.batch}: pass a multiple of {ranks} as --batch")
    if options.width % options.heads:
        sys.exit(f"a width of {options.width} cannot be split over {options.heads} heads: change --width or --heads")
    if options.resume and not (options.out / "checkpoint" / ".metadata").exists():
        sys.exit(f"there is no checkpoint in {options.out}: run without --resume first, with the same --out")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=options.out).close()  # fail before the training, not after it
    except OSError as cause:
        arguments.error(f"--out {options.out} cannot be written ({cause.strerror})")


def main() -> None:
    options = arguments.parse_args()
    check(options)
    start(options.backend)
    console, ranks = Console(), dist.get_world_size()
    trainer = Trainer(options, init_device_mesh("cpu", (ranks,)))
    if options.resume:
        trainer.load(options.out / "checkpoint")
    history, test_loss = trainer.history, trainer.test()
    if options.resume and dist.get_rank() == 0:
        print(f"resumed on {ranks} rank{'s' * (ranks > 1)} after step {len(history.losses)}: ", end="")
        print(f"loss on held-out text {test_loss:.4f}, when saved {history.tests[-1][1]:.4f}", flush=True)
    history.runs.append((len(history.losses), ranks))
    history.tests.append((len(history.losses), test_loss))
    seconds = train(trainer, console)
    history.tests.append((len(history.losses), trainer.test()))
    trainer.save(options.out / "checkpoint")

    alone = step_alone(options)
    whole = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    title = f"{ranks} rank{'s' * (ranks > 1)} over {dist.get_backend()}"
    dist.destroy_process_group()
    if trainer.rank == 0:
        report(trainer, seconds, alone, Table(title=title, title_justify="left", show_header=False), console)
        model = model_of(options)  # not sharded
        model.load_state_dict(whole)
        text = Text(sample(model, options.context))
        console.print(Panel(text, title="text written by the model", title_align="left", width=100))
        print(f"wrote {options.out / 'checkpoint'}")
        if find_spec("matplotlib") is None:
            print("no plot: matplotlib is not installed; in the checkout: pip install '.[examples]'")
        else:
            draw(history, options.out / "loss.png")
            print(f"wrote {options.out / 'loss.png'}")


if __name__ == "__main__":
    main()
