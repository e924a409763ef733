"""torchft: two replicas train, one is killed and replaced. With DDP the weights are those of training in one process."""

import os
import signal
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from regression import (
    BATCH,
    EPOCHS,
    RATE,
    SAMPLES,
    check_weights,
    end_together,
    make_data,
    make_model,
    report,
    train_alone,
)
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

HOST = "127.0.0.1"
REPLICAS = 2
BATCHES = torch.arange(SAMPLES).split(BATCH * REPLICAS)
STEPS = EPOCHS * len(BATCHES)
SYNC_EVERY = 2
KILLED_AT, REPLACED_AT = 2, 5
"""The steps at which the second replica is killed, and with which its replacement begins; LocalSGD waits for it at once."""


def gradients_of(model: nn.Module, batch: torch.Tensor) -> None:
    inputs, targets = (tensor[batch] for tensor in make_data().tensors)
    nn.functional.mse_loss(model(inputs), targets).backward()


def train(how: str, number: int, attempt: int, lighthouse: str, port: int) -> None:
    """Train as one replica. ``attempt`` is 1 for the replacement; ``port`` is that of a store which outlives it."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    shared = dist.TCPStore(HOST, port, is_master=False)
    dist.init_process_group(
        "asyncdist",
        store=shared,
        # gloo needs a number that no other process has had.
        rank=REPLICAS * attempt + number,
        world_size=2 * REPLICAS,
        enable_reconfigure=True,
    )
    own = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=dist.group.WORLD,  # no wrapper: torchft calls its get_reconfigure_handle() and reconfigure()
        min_replica_size=1,
        load_state_dict=lambda state: (model.load_state_dict(state[0]), optimizer.load_state_dict(state[1])),
        state_dict=lambda: (model.state_dict(), optimizer.state_dict()),
        use_async_quorum=False,
        timeout=timedelta(seconds=60),
        replica_id=str(number),
        lighthouse_addr=lighthouse,
        store_addr=HOST,
        store_port=own.port,
        hostname=HOST,
        rank=0,
        world_size=1,
    )

    def die_if_told() -> None:
        if (number, attempt, manager.current_step()) == (1, 0, KILLED_AT):
            os.kill(os.getpid(), signal.SIGKILL)

    sizes = set()
    if how == "ddp":
        parallel, stepper = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
        while manager.current_step() < STEPS:
            stepper.zero_grad()  # the members of this step are known from here on
            size, step = manager.num_participants(), manager.current_step()
            if step in (0, REPLACED_AT) and size < REPLICAS:
                continue
            die_if_told()
            sizes.add(size)
            gradients_of(parallel, BATCHES[step % len(BATCHES)].chunk(size)[manager.participating_rank()])
            stepper.step()
        assert sizes == ({1, 2} if number == 0 else {2}), sizes
        check_weights(model.state_dict(), train_alone(REPLICAS)[0])
    else:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        local_sgd = (
            LocalSGD(manager, model, optimizer, SYNC_EVERY)
            if how == "local_sgd"
            else DiLoCo(manager, [model], optimizer, outer, SYNC_EVERY)
        )
        with local_sgd:
            while manager.current_step() < STEPS:
                die_if_told()
                for inner in range(SYNC_EVERY):
                    optimizer.zero_grad()
                    gradients_of(model, BATCHES[(SYNC_EVERY * manager.current_step() + inner) % len(BATCHES)])
                    optimizer.step()
    report(weights=[*map(torch.Tensor.tolist, model.state_dict().values())], steps=manager.current_step())
    end_together()
    manager.shutdown(wait=False)


def main(how: str) -> None:
    """Start the replicas, and replace the one that is killed."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    alone = 1 if how == "ddp" else REPLICAS
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=alone, heartbeat_timeout_ms=1000)
    address = f"http://{HOST}:{lighthouse.address().rpartition(':')[2]}"

    def start(number: int, attempt: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, how, str(number), str(attempt), address, str(store.port)])

    survivor, victim = start(0, 0), start(1, 0)
    assert victim.wait() == -signal.SIGKILL
    assert [each.wait() for each in (start(1, 1), survivor)] == [0, 0]
    lighthouse.shutdown()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
    else:
        main(sys.argv[1])
