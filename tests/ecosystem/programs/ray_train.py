"""Ray Train's `TorchTrainer` with two workers: DDP by `prepare_model`, a sharded loader, reports and a checkpoint."""

import os
import tempfile

import ray
import ray.train
import torch
import torch.distributed
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from regression import BATCH, EPOCHS, RATE, check_weights, make_data, make_model, report, train_alone
from torch import nn
from torch.utils.data import DataLoader


def train() -> None:
    """Train in one worker."""
    torch.set_num_threads(1)
    model = prepare_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = prepare_data_loader(DataLoader(make_data(), batch_size=BATCH))
    losses = []
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            losses.append(mean.item() / 2)
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.module.state_dict(), f"{folder}/model.pt")
            ray.train.report({"loss": losses[-1]}, checkpoint=Checkpoint.from_directory(folder))
    alone, losses_alone = train_alone()
    check_weights(model.module.state_dict(), alone)
    torch.testing.assert_close(losses, losses_alone)
    report(losses=losses, weights=[value.tolist() for value in model.module.state_dict().values()])


if __name__ == "__main__":
    results = os.environ["ECOSYSTEM_RESULTS"]
    environment = {
        "env_vars": {"ECOSYSTEM_RESULTS": results},
        # torch 2.14 and later find the back end without this hook.
        "worker_process_setup_hook": "asyncdist.torch_backend.registration.register_backend",
    }
    ray.init(num_cpus=3, include_dashboard=False, runtime_env=environment)
    trainer = TorchTrainer(
        train,
        torch_config=TorchConfig(backend="asyncdist"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=results),
    )
    print(trainer.fit().metrics)
    ray.shutdown()
