"""TRL's side of benchmarks.e2e_reward and benchmarks.lora: GRPOTrainer.train() as a user would call it, with
a clock on its parts.

Writes one JSON object to --result: seconds until training began, then for each step seconds, those of
generation, and the mean reward.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]  # noqa: E402

from benchmarks.e2e.tasks import SCORES  # noqa: E402
from benchmarks.e2e.trl_settings import make_common_settings  # noqa: E402


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that says how long it generates."""

    generate_s = 0.0

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        made = super()._generate_single_turn(*arguments, **options)
        self.generate_s += time.perf_counter() - started
        return made


class Record(TrainerCallback):
    """What each step cost."""

    def __init__(self, trainer: TimedTrainer) -> None:
        self.trainer = trainer
        self.steps: list[dict[str, float]] = []
        self.startup_s = 0.0
        self._began, self._generate_s = 0.0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.startup_s = time.perf_counter() - STARTED
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        generate_s = self.trainer.generate_s - self._generate_s
        self.steps.append({"wall_s": now - self._began, "generate_s": generate_s})
        self._began, self._generate_s = now, self.trainer.generate_s


def make_lora_config(lora: dict[str, Any] | None) -> Any:
    """peft's; None: the model trains."""
    if lora is None:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=int(lora["rank"]),
        lora_alpha=int(lora["alpha"]),
        lora_dropout=0.0,
        target_modules=lora["targets"],
        task_type="CAUSAL_LM",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="JSON, written by benchmarks.e2e_reward")
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    settings = json.loads(arguments.settings.read_text("utf-8"))
    torch.set_num_threads(settings["threads"])
    score = SCORES[settings["task"]]

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [
            score(completion[0]["content"], right)
            for completion, right in zip(completions, answer, strict=True)
        ]

    rows = settings["prompts_per_step"] * settings["samples"]
    with tempfile.TemporaryDirectory() as folder:
        common = make_common_settings(
            lr=settings["lr"], max_grad_norm=1.0, clip=0.2, samples=settings["samples"], rows=rows
        )
        own = {"logging_steps": 1, "seed": settings["seed"], "adam_beta2": settings["beta2"]}
        config = GRPOConfig(
            output_dir=folder,
            **(common | own | {"bf16": settings["precision"] == "bfloat16"}),
            use_transformers_continuous_batching=settings["continuous"],
            epsilon_high=settings["clip_high"],
            per_device_train_batch_size=settings["micro_batch_rows"],
            gradient_accumulation_steps=rows // settings["micro_batch_rows"],
            max_completion_length=settings["max_new_tokens"],
            max_steps=settings["steps"],
            shuffle_dataset=False,  # the rows are in our order
        )
        prompts = [[{"role": "user", "content": row["prompt"]}] for row in settings["rows"]]
        answers = [row["answer"] for row in settings["rows"]]
        dataset = Dataset.from_dict({"prompt": prompts, "answer": answers})
        trainer = TimedTrainer(
            model=settings["model"],
            reward_funcs=reward,
            args=config,
            train_dataset=dataset,
            peft_config=make_lora_config(settings["lora"]),
        )
        record = Record(trainer)
        trainer.add_callback(record)
        prompt_ids = trainer._tokenize_prompts([dataset[0]["prompt"]])[0][0]
        trainer.train()
    rewards, tied = (
        [entry[name] for entry in trainer.state.log_history if name in entry]
        for name in ("reward", "frac_reward_zero_std")
    )
    each = zip(record.steps, rewards, tied, strict=True)
    result = {
        "startup_s": record.startup_s,
        "steps": [{**step, "reward": value, "tied": share} for step, value, share in each],
        "prompt_ids": [int(token) for token in prompt_ids],
        "stop_ids": sorted(trainer.eos_token_ids),
    }
    arguments.result.write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
