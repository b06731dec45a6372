"""One rank of test_sharded_state: does a list of jobs, each: load or begin anew, train, save, write down what
it has.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from rollouts.backends.fsdp import check_same
from rollouts.backends.state import hold_state, read_state
from rollouts.errors import RolloutsError
from rollouts.models.digests import compute_model_digests
from rollouts.models.export import write_hf_stream
from rollouts.models.load import load_hf_model
from rollouts.models.sharded import load_sharded_weights, make_meta_model, reshard
from rollouts.ranks.group import AgreedFailure, Ranks

IDS = torch.arange(3, 43)[None]


def make_model(path: Path, mesh: DeviceMesh) -> Any:
    model = make_meta_model(path)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    load_sharded_weights(model, path)
    return model


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        ids = IDS + 7 * step + dist.get_rank()
        torch.log_softmax(model(ids, use_cache=False).logits, -1)[..., 5].sum().neg().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.rand(dist.get_rank() + 1)  # random states move apart


def run_job(job: dict[str, Any], folder: Path, mesh: DeviceMesh) -> None:
    rank = dist.get_rank()
    source = folder / job.get("load", "model")
    torch.manual_seed(rank)
    model = make_model(source, mesh)
    if job.get("compare"):
        loaded = load_hf_model(source)
        same = torch.equal(model(IDS, use_cache=False).logits, loaded(IDS, use_cache=False).logits)
        (folder / f"{job['name']}-same-{rank}.json").write_text(json.dumps(same))
        reshard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if "load" in job:
        loaded = read_state(source, model, ["steps"], make_ranks(mesh))
        loaded.apply(optimizer, torch.device("cpu"))
        assert loaded.position["steps"] == 2.0
    train(model, optimizer, job.get("train", 0))
    reshard(model)
    write_down(folder, job["name"], model, optimizer)
    if "save" in job:
        save(folder / job["save"], model, optimizer, make_ranks(mesh))
    dist.barrier()


def write_down(folder: Path, name: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """All tensors whole, and the digests of every rank's random state."""
    found: dict[str, Tensor] = {}
    for parameter_name, parameter in model.named_parameters():
        found[f"weight/{parameter_name}"] = whole(parameter)
        found |= {
            f"{kind}/{parameter_name}": whole(value) for kind, value in optimizer.state[parameter].items()
        }
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    (folder / f"{name}-rng-{dist.get_rank()}.json").write_text(json.dumps(digest))
    if dist.get_rank() == 0:
        save_file(found, folder / f"{name}.safetensors")


def save(path: Path, model: Any, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    path.mkdir(exist_ok=True)
    hold_state(model, optimizer, {"steps": 2.0}, ranks, copied=False).write(path)
    weights = ((name, whole(parameter)) for name, parameter in model.named_parameters())
    if dist.get_rank():
        for _ in weights:  # gathering is everybody's
            pass
        return
    with write_hf_stream(model, path, shard_bytes=100_000) as sink:
        for name, weight in weights:
            sink([(name, weight)])


def check_refusals(folder: Path, mesh: DeviceMesh, names: list[str]) -> None:
    """What each damaged directory is refused with, on every rank."""
    said = {}
    for name in names:
        try:
            make_model(folder / name, mesh)
            said[name] = "nothing"
        except RolloutsError as error:
            said[name] = f"{type(error).__name__}: {error}"
    (folder / f"refusals-{dist.get_rank()}.json").write_text(json.dumps(said))


def check_differences(folder: Path, names: list[str], mesh: DeviceMesh) -> None:
    """What ranks of which the last has another model directory are refused with; and equal ones are not."""
    said = {}
    for name in ["model", *names]:
        last = dist.get_rank() == dist.get_world_size() - 1
        try:
            check_same(
                make_ranks(mesh), compute_model_digests(folder / (name if last else "model")), "copy it"
            )
            said[name] = "nothing"
        except AgreedFailure as raised:
            said[name] = f"{type(raised.error).__name__}: {raised.error}"
    (folder / f"differences-{dist.get_rank()}.json").write_text(json.dumps(said))


def make_ranks(mesh: DeviceMesh) -> Ranks:
    world = dist.get_world_size()
    return Ranks(dist.get_rank(), world, world, torch.device("cpu"), mesh)


def main() -> None:
    folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for job in plan["jobs"]:
        shape = tuple(job.get("mesh", [dist.get_world_size()]))
        run_job(
            job, folder, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        )
    if plan.get("refusals"):
        check_refusals(folder, init_device_mesh("cpu", (dist.get_world_size(),)), plan["refusals"])
    if plan.get("differences"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        check_differences(folder, plan["differences"], mesh)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
