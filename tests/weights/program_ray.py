"""Two actors exchange tensors over the asyncdist transport of Ray; prints what they found."""

import os
from pathlib import Path

import ray
import torch

from asyncdist.weights.adapters.ray_transport import register_ray_transport

register_ray_transport()


@ray.remote(num_cpus=0)
class Learner:
    def __init__(self):
        self.state = {"a": torch.zeros(1_000_000), "b": torch.ones(3, 4, dtype=torch.bfloat16), "none": torch.empty(0)}

    @ray.method(tensor_transport="asyncdist")
    def weights(self, step):
        self.state["a"].fill_(step)
        return self.state

    def pid(self):
        return os.getpid()


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Actor:
    def load(self, state):
        self.state = state
        mapped = sum("asyncdist-segment" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return state["a"].min().item(), state["a"].max().item(), list(state["b"].shape), mapped

    def again(self):
        return self.state["a"].max().item()


def main():
    variables = {name: os.environ[name] for name in ("PYTHONPATH", "ASYNCDIST_HOST") if name in os.environ}
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    learner = Learner.remote()
    here, elsewhere = Actor.remote(), Actor.options(runtime_env={"env_vars": {"ASYNCDIST_HOST": "elsewhere"}}).remote()
    for step in range(6):
        object_ref = learner.weights.remote(step)
        print(step, *ray.get([here.load.remote(object_ref), elsewhere.load.remote(object_ref)]))
    ray.get(learner.weights.remote(7))
    print("kept", ray.get(here.again.remote()), ray.get(elsewhere.again.remote()))
    os.kill(ray.get(learner.pid.remote()), 9)
    print("after death", ray.get(here.again.remote()))
    ray.shutdown()


if __name__ == "__main__":
    main()
