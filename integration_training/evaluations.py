"""Evaluations of a run: which are in the record, and those that are made."""

import trio

from integration_training.opening import HELD_OUT, Run, Stage
from rollouts.config.load import EVALUATE
from rollouts.evaluation.evaluate import evaluate
from rollouts.evaluation.policy_metrics import measure_responses
from rollouts.generation.samples import convert_to_batch
from rollouts.metrics.jsonl import drop_outdated, read_rows
from rollouts.protocols import InferenceEngine
from rollouts.reference.score import open_frozen_reference
from rollouts.rewards.parts import RewardParts
from rollouts.types import Numbers

PAIRS = "pairs"  # the evaluation of held-out preferences


def is_evaluated(run: Run, stage: str, step: int, name: str = HELD_OUT) -> bool:
    """Whether evaluations.jsonl has the row of this name already, of these weights: not of ones that were
    lost, after which an older checkpoint was taken and the step trained again. True when there is nothing to
    evaluate on.
    """
    if not (run.prepared.list_held_out(stage) if name == PAIRS else run.rows.held_out):
        return True
    rows = drop_outdated(read_rows(run.run_dir.evaluations), read_rows(run.run_dir.metrics))
    return any((row["stage"], row["step"], row.get("name", HELD_OUT)) == (stage, step, name) for row in rows)


async def evaluate_once(
    run: Run, opened: Stage, stage: str, step: int, *, parts: RewardParts | None = None
) -> None:
    """Evaluates the weights of `stage` after `step` on the held-out prompts, unless the record has it. RL
    brings its engine to them after each step; here every other stage does.

    Metrics of the policy are under the trainer's weights and at the temperature of RL, however the evaluation
    sampled; none where no sample has tokens. Of the `parts` of RL's reward it tells how they go with the
    reward of the evaluation.
    """
    engine, scores = opened.engine, run.functions.eval_reward is not None or run.config.rollout.is_scored
    if not run.config.eval or not engine or not scores or is_evaluated(run, stage, step):
        return
    if opened.name != "rl":
        await opened.sync_weights(opened.backend, [engine], opened.backend.weight_version)
    await evaluate_weights(run, opened, engine, stage, step, HELD_OUT, parts)


async def evaluate_weights(
    run: Run,
    opened: Stage,
    engine: InferenceEngine,
    stage: str,
    step: int,
    name: str,
    parts: RewardParts | None = None,
) -> Numbers:
    """The metrics of the weights that an engine has, which are in the record under `name`."""
    config, rollout, reward = run.config.eval, run.config.rollout, run.functions.eval_reward
    assert config, "who calls this has [eval]"
    with run.logger.recorder.measure("evaluate"):
        result = await evaluate(
            run.rows.held_out,
            engine,
            generate=run.choose_generate(),
            reward=reward,
            sampling=run.choose_sampling(config),
            samples_per_prompt=config.samples_per_prompt,
            seed=run.config.seed,
            reward_timeout_s=rollout.reward_timeout_s,
            generate_timeout_s=rollout.generate_timeout_s,
        )
        metrics = result.metrics(name)
        samples = [sample for sample in result.scored if sample.response_length]
        found: dict[str, float] = {}
        if samples and name == HELD_OUT and (config.policy_metrics or opened.name == EVALUATE):
            batch = convert_to_batch(samples, temperature=rollout.temperature)
            values = await opened.backend.forward_with_entropy(batch)
            if run.against:
                async with open_frozen_reference(run.against, **opened.scoring) as other:
                    values.append(await other.score(batch))
            found |= await trio.to_thread.run_sync(measure_responses, batch, values)
        if parts:
            found |= await parts.correlate(result.scored)
        metrics |= {f"eval/{HELD_OUT}/{name}": value for name, value in found.items()}
    weights = await engine.weight_version()
    held = stage if name == HELD_OUT else name
    await run.logger.log_samples(f"eval-{held}", step, weights, result.samples)
    await run.logger.log_evaluation(stage, step, weights, name, metrics)
    return metrics
