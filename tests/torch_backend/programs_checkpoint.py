"""Distributed checkpoints: saved at once or in the background, loaded by another number of ranks."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from toys import Tower, state, train


class Application(Stateful):
    """A model and its optimizer, as one stateful object."""

    def __init__(self, seed):
        self.model = Tower(seed)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, loaded):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )

    def train(self, steps):
        """Train on the same samples on every rank, so that the result does not depend on the world size."""
        return train(self.model, 0, steps=steps, optimizer=self.optimizer)


def save(rank, world, folder):
    application = Application(seed=0)
    application.train(2)
    checkpoint.save({"application": application}, checkpoint_id=folder)
    return [state(application.model), application.train(2)]


def save_in_the_background(rank, world, folder):
    """Training continues while a group of its own saves the earlier state."""
    application = Application(seed=0)
    application.train(2)
    own = dist.new_group()
    saving = checkpoint.async_save({"application": application}, checkpoint_id=folder, process_group=own)
    saved = state(application.model)
    losses = application.train(2)
    saving.result()
    return [saved, losses]


def load(rank, world, folder):
    application = Application(seed=1)
    application.train(1)
    checkpoint.load({"application": application}, checkpoint_id=folder)
    return [state(application.model), application.train(2)]


def save_and_load_tensors(rank, world, folder):
    """Distributed tensors are loaded with other placements, plain tensors on every rank, and objects unchanged."""
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(56.0).view(7, 8)
    saved = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "whole": whole * 2,
        "step": 7,
        "nested": {"mine": torch.full((3,), float(rank)) if rank == 0 else torch.zeros(3)},
    }
    checkpoint.save(saved, checkpoint_id=folder)
    loaded = {
        "rows": distribute_tensor(torch.zeros(7, 8), mesh, [Shard(1)]),
        "whole": torch.zeros(7, 8),
        "step": 0,
        "nested": {"mine": torch.ones(3)},
    }
    checkpoint.load(loaded, checkpoint_id=folder)
    return [loaded["rows"].full_tensor(), loaded["rows"].to_local(), loaded["whole"], loaded["step"], loaded["nested"]]
