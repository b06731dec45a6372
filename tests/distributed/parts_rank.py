"""One rank of test_sharded_parts: a save, and a copy that is written later, of a model after one step; what
each rank held and wrote.

torchrun … -m tests.distributed.parts_rank SHARD_SIZE FOLDER
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from rollouts.backends import state
from rollouts.backends.captures import compute_held_bytes
from rollouts.backends.open import open_trainer
from rollouts.config.tables import OptimConfig
from rollouts.models.export import deal_weights, name_parts
from rollouts.models.sharded import get_local
from rollouts.ranks.launch import read_launch
from rollouts.ranks.meet import all_gather_floats, connect

state.RANK_BUCKET_BYTES = 40_000  # several turns, and weights that are larger


def step(trainer):
    """AdamW with a gradient that every rank makes of its own rows."""
    torch.manual_seed(0)
    for _, parameter in trainer.model.named_parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer.optim_step(None, settings={"lr": 1e-2}, max_grad_norm=None)


def capture(trainer, ranks, path):
    """Copies, changes the weights, and only then writes."""
    deal = deal_weights(trainer.model, ranks.rank, ranks.world_size)
    needed = compute_held_bytes(trainer.model, ranks, deal)
    held = trainer.capture(({"steps": 1.0}, None), name="held")
    for parameter in trainer.model.parameters():
        get_local(parameter).add_(1.0)
    if ranks.rank == 0:
        path.mkdir()
    all_gather_floats(ranks, [0.0])
    count = held.write(path)
    counts = [int(count) for count in all_gather_floats(ranks, [float(count)])[:, 0]]
    if ranks.rank == 0:
        name_parts(path, counts)
    moments = sum(tensor.nbytes for name, tensor in held.state.tensors.items() if name.startswith("exp_avg"))
    weights = [tensor for bucket in held.weights for _, tensor in bucket]
    return {
        "held": moments + sum(tensor.nbytes for tensor in weights),
        "weights": sum(tensor.nbytes for tensor in weights),
        "storage": sum(tensor.untyped_storage().nbytes() for tensor in weights),
        "planned": needed,
        "dealt": [name for name, _ in deal.parameters[ranks.rank]],
    }


def main():
    torch.set_num_threads(1)
    folder = Path(sys.argv[-1])
    ranks = connect(read_launch(os.environ), int(sys.argv[1]), lambda: "cpu").ranks
    trainer = open_trainer(folder / "model", OptimConfig(), {}, ranks, lambda: None)
    step(trainer)
    trainer.save(({"steps": 1.0}, None), path=str(folder / "saved"))
    weights = {}
    trainer.stream_weights(
        lambda bucket: weights.update({name: torch.as_tensor(tensor).clone() for name, tensor in bucket})
    )
    if ranks.rank == 0:
        save_file(weights, folder / "weights.safetensors")
    found = capture(trainer, ranks, folder / "beside")
    (folder / f"found-{ranks.rank}.json").write_text(json.dumps(found))
    all_gather_floats(ranks, [0.0])
    # gloo's threads may still hold a collective's tensors when it has returned; an interpreter that ends in
    # that moment is aborted (pytorch/pytorch issue 190489)
    os._exit(0)


if __name__ == "__main__":
    main()
