"""TRL's side of benchmarks.train_step: GRPOTrainer.train() on rollouts that are given, a turn at a time.

The trainer's own loop runs: its loss, accumulation, clipping and optimizer. In place of generation it waits
for its turn and gets the batch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from benchmarks.e2e.children import Stopwatch, read_memory, read_question, take_stdout, try_restart_peak
from benchmarks.e2e.step_batch import CLIP, GROUPS, LR, MAX_GRAD_NORM, SAMPLES, StepBatch
from benchmarks.e2e.trl_settings import make_common_settings


class GivenRollouts(GRPOTrainer):
    """GRPOTrainer whose rollouts come from a file, when the parent says so."""

    batch_path: Path
    answers: Any
    watch: Stopwatch | None = None
    gradients_path: str | None = None

    def _generate_and_score_completions(
        self, inputs: list[dict[str, Any]]
    ) -> dict[str, Any]:  # the hook that the trainer generates in
        while (question := read_question()) is not None:
            name = question.pop("do")
            if name == "memory":
                self.answers.write(json.dumps(read_memory()) + "\n")
                continue
            self.gradients_path = question.get("path")
            batch = StepBatch.load(self.batch_path)
            self.watch = Stopwatch()
            return make_inputs(batch)
        sys.exit(0)  # no more turns


def make_inputs(batch: StepBatch) -> dict[str, Any]:
    """What GRPOTrainer makes of such rollouts: prompts are of one length, responses padded to the longest."""
    width = int(batch.lengths.max())
    mask = (torch.arange(width) < torch.from_numpy(batch.lengths)[:, None]).long()
    return {
        "prompt_ids": torch.from_numpy(batch.prompts),
        "prompt_mask": torch.ones(batch.prompts.shape, dtype=torch.long),
        "completion_ids": torch.from_numpy(batch.responses)[:, :width].contiguous(),
        "completion_mask": mask,
        "advantages": torch.from_numpy(batch.advantages),
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": torch.from_numpy(batch.old_log_probs)[:, :width].contiguous(),
    }


class Answer(TrainerCallback):
    """Tells the parent what a step cost, after the optimizer's; and writes the gradients that it stepped
    with, if they are asked for.
    """

    def __init__(self, trainer: GivenRollouts) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.gradients_path is not None:
            from safetensors.torch import save_file

            named = kwargs["model"].named_parameters()
            save_file(
                {name: parameter.grad for name, parameter in named if parameter.grad is not None},
                self.trainer.gradients_path,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer.watch is not None
        self.trainer.answers.write(json.dumps(self.trainer.watch.read()) + "\n")


def no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch-rows", type=int, required=True)
    arguments = parser.parse_args()
    answers = take_stdout()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            **make_common_settings(
                lr=LR, max_grad_norm=MAX_GRAD_NORM, clip=CLIP, samples=SAMPLES, rows=GROUPS * SAMPLES
            ),
            per_device_train_batch_size=arguments.micro_batch_rows,
            gradient_accumulation_steps=GROUPS * SAMPLES // arguments.micro_batch_rows,
            max_steps=10**6,
        )
        dataset = Dataset.from_list([{"prompt": "-"}] * GROUPS)
        trainer = GivenRollouts(
            model=arguments.model, reward_funcs=no_reward, args=config, train_dataset=dataset
        )
        trainer.batch_path, trainer.answers = Path(arguments.batch), answers
        trainer.add_callback(Answer(trainer))
        try_restart_peak()
        trainer.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
