"""Every metric that a run can log: name, unit, meaning. docs/run_directory.md shows this table, and a test
holds the two equal.

A name may have parts in braces: `{k}` is a whole number, any other one segment of lower_snake. A user's own
loss may log more. Whoever follows the files can show a metric under another framework's name too: `ALIASES`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

ALL, RL, SFT, PREFERENCES = "all", "rl", "sft", "preference, reward_model"


class MetricName(NamedTuple):
    """One metric, or all of one pattern."""

    name: str
    unit: str  # "" for a number without one: a loss, a ratio, a reward
    stages: str  # whose rows may have it
    meaning: str


def _make(stages: str, *rows: tuple[str, str, str]) -> tuple[MetricName, ...]:
    return tuple(MetricName(name, unit, stages, meaning) for name, unit, meaning in rows)


METRICS: tuple[MetricName, ...] = (
    *_make(
        ALL,
        ("loss/total", "", "the loss, normalised by its unit; absent in a skipped step"),
        ("loss/nll", "nats", "mean negative log-likelihood per trained token; of `orpo` and `cpo` their likelihood part (sft, preference)"),
        ("entropy/mean", "nats", "mean entropy of the policy at the trained tokens, where the backend computes it"),
        ("optim/lr", "", "learning rate of the step, of its last update where there are several"),
        ("optim/grad_norm", "", "before clipping; absent when not finite"),
        ("optim/clipped", "0 or 1", "1 if the gradient was clipped"),
        ("optim/skipped_steps", "steps", "optimizer steps of this row that changed nothing, because loss or gradient was not finite"),
        ("checkpoint/failed", "checkpoints", "that could not be saved since the last row; absent if none failed"),
        ("time/{phase}", "s", "in a phase of the step: `generate` (rewards included), `log_probs`, `train`, `weight_sync`"),
        ("time/weight_sync_pause", "s", "for which engines were paused, a part of `time/weight_sync` (rl)"),
        ("time/step", "s", "the whole step, checkpoints and evaluations left out"),
        ("perf/trained_tokens_per_s", "tokens/s", "trained tokens of the batch over `time/train`"),
    ),
    *_make(
        PREFERENCES,
        ("rewards/chosen", "", (
            "mean reward of the chosen (of KTO the desirable) responses: of DPO and its family β times the log ratio to the reference, "
            "of a reward model its scores"
        )),
        ("rewards/rejected", "", "the same of the other responses"),
        ("rewards/margins", "", "difference of the two"),
        ("rewards/accuracies", "share", "pairs in which the margin is positive"),
        ("rewards/max", "", "largest score of the batch (reward_model)"),
        ("rewards/min", "", "smallest score of the batch (reward_model)"),
        ("logps/chosen", "nats", "mean log-prob of a chosen response; of `simpo` and `orpo` per token (preference)"),
        ("logps/rejected", "nats", "the same of the other responses"),
        ("log_odds/mean", "nats", "log of the odds ratio of chosen and rejected (`orpo`)"),
        ("kto/reference_point", "nats", "z₀ of the batch (`kto`)"),
        ("kto/desirable/frac", "share", "rows that are desirable (`kto`)"),
        ("kto/desirable_weight", "", "weight of the desirable rows (`kto`)"),
        ("kto/undesirable_weight", "", "weight of the others (`kto`)"),
    ),
    *_make(
        RL,
        ("reward/mean", "", "reward over the samples of the batch"),
        ("reward/std", "", "its standard deviation"),
        ("reward/part/{name}/mean", "", "each named part of the reward, over the samples that have it"),
        ("advantage/abs_mean", "", (
            "mean absolute advantage over rows (over trained tokens where the advantage function answers per token); 0 means the batch "
            "teaches nothing"
        )),
        ("advantage/skipped_rows", "rows", (
            "not computed, for all their advantages are 0 (`rl.skip_zero_advantage`); the means of `ratio`, `entropy` and the like are "
            "over the others. Absent where there are none"
        )),
        ("kl/ref", "nats", "mean over tokens of lp − ref, an estimate of KL(policy ‖ reference)"),
        ("kl/ref_per_sample", "nats", (
            "the sum over tokens of lp − ref, lp from before the updates, mean over trajectories: what a KL controller follows, and "
            'what `kl_in = "reward"` takes off the rewards, before the coefficient. Absent where it is not finite'
        )),
        ("kl/coef", "", "coefficient of the KL term in this step; absent where the reference was not asked"),
        ("algorithm/change", "changes", "of `[[rl.changes]]`, that have been made: 0 before the first. The log names what holds from then on"),
        ("divergence/mean", "nats", "of teacher and student per token (`gkd_loss`)"),
        ("mismatch_kl/mean", "nats", "k3 estimate, per token, of how far the trainer's distribution is from the engine's"),
        ("mismatch_kl/max", "nats", "its largest value"),
        ("mismatch/logprob_abs_diff", "nats", "mean absolute difference per token of trainer and engine log-probs"),
        ("mismatch/prob_abs_diff/max", "", "largest absolute difference of their probabilities of a sampled token"),
        ("mismatch/k1", "nats", "k1 estimate of KL(engine ‖ trainer)"),
        ("mismatch/chi2", "", "chi-squared of trainer against engine"),
        ("mismatch/ess", "share", "effective sample size over the number of tokens, of the weights trainer / engine: 1 is perfect"),
        ("approx_kl/mean", "nats", "k3 estimate, per token, of KL(old ‖ policy): how far the updates on this batch have moved"),
        ("ratio/mean", "", "exp(lp − old) per token (per sequence in GSPO)"),
        ("ratio/max", "", "its largest value"),
        ("clip_ratio", "share", "tokens whose gradient the clip took away. In `cispo` those whose weight was clipped: they keep a gradient"),
        ("clip_ratio/low", "share", "of them those with A < 0; in `cispo` with a low weight, of either sign of A"),
        ("clip_ratio/high", "share", "of them those with A > 0; in `cispo` with a high weight, of either sign of A"),
        ("clip_ratio/dual", "share", "tokens with A < 0 whose loss the dual clip bounds"),
        ("clip_ratio/cov", "share", "tokens left out for their covariance (`clip_cov`) or held back (`kl_cov`)"),
        ("importance_weight/mean", "", "weight of the correction, after caps and masks"),
        ("importance_weight/mean_square", "", "its square"),
        ("importance_weight/max", "", "the largest"),
        ("importance_weight/ess", "share", "effective sample size of the weights over the number of tokens"),
        ("importance_weight/capped", "share", "tokens at `importance_cap`"),
        ("importance_weight/dropped", "share", "tokens whose weight is 0 (with `correction`)"),
        ("response_length/mean", "tokens", "that train, per sample"),
        ("response_length/min", "tokens", "of the shortest"),
        ("response_length/max", "tokens", "of the longest"),
        ("truncated/frac", "share", "samples cut at the token limit"),
        ("groups/drawn", "prompts", "drawn for the batch"),
        ("groups/kept", "groups", "that train"),
        ("groups/dropped/{reason}", "groups", "drawn and not trained, by reason: `surplus`, `stale`, `aborted`, or what a filter named"),
        ("groups/accepted_frac", "share", "of the groups that the filters decided on, those that they kept"),
        ("groups/zero_std_frac", "share", "scored groups, filtered ones included, whose rewards are all equal: no signal"),
        ("groups/reward_std/mean", "", "standard deviation of the rewards inside a group, mean over the same groups"),
        ("fail/{class}", "samples", "by class: `generate`, `reward`, `reward_timeout`, `reward_crashed`, `engine`, `data`, `infrastructure` …"),
        ("off_policy/mean", "steps", "lag: trainer's version − oldest version of any trained token of a row"),
        ("off_policy/max", "steps", "the largest"),
        ("data/epoch", "epochs", "of the prompt buffer, from 0"),
        ("data/drawn", "prompts", "taken off the stream so far"),
        ("data/returned", "prompts", "waiting to be drawn again"),
        ("data/source/{name}/epoch", "epochs", "of a source of a mixture, from 0"),
        ("data/source/{name}/drawn", "prompts", "taken off it so far"),
        ("data/source/{name}/share", "share", "of the next draws"),
        ("optim/updates", "steps", "optimizer steps on this batch, where it may have several; fewer than planned where `kl_stop` ended them"),
        ("value/mean", "", "mean value of the critic at the trained tokens, before each part's update"),
        ("return/mean", "", "mean return that it learns"),
        ("value/explained_variance", "", "1 − Var(return − value) / Var(return): 1 is perfect, 0 no better than a constant"),
        ("value/clip_ratio", "share", "tokens whose value the clip of the value loss held"),
        ("critic/loss/total", "", "of the critic: as `loss/total`"),
        ("critic/optim/lr", "", "as `optim/lr`"),
        ("critic/optim/grad_norm", "", "as `optim/grad_norm`"),
        ("critic/optim/clipped", "0 or 1", "as `optim/clipped`"),
        ("critic/optim/skipped_steps", "steps", "as `optim/skipped_steps`"),
        ("critic/advantage/skipped_rows", "rows", "as `advantage/skipped_rows`"),
        ("reference/updates", "updates", "how often a reference that follows the policy has moved"),
        ("reference/kl_bias", "nats", "by which a quantised reference moves a k1 KL, per token"),
        ("reference/log_prob_error/mean", "nats", "absolute error of its log-probs, per token"),
        ("reference/log_prob_error/max", "nats", "the largest"),
        ("weight_sync/probe_difference/max", "nats", "how far engine and trainer differ on the probe: see [weight_sync.md](weight_sync.md)"),
        ("weight_sync/engines_updated", "engines", "that proved the new weights"),
        ("weight_sync/engines_failed", "engines", "that did not, and are out of service"),
        ("weight_sync/verified_by_checksum", "engines", "whose change only the checksum showed"),
        ("weight_sync/bytes", "bytes", "of weights written to the snapshot, or sent"),
        ("engine/{name}/state", "", (
            "of a member of the fleet, in steps with an update: 0 healthy, 1 suspect, 2 dead, 3 restarting, 4 stale: "
            "[engines.md](engines.md)"
        )),
        ("engine/{name}/version", "", "weight version that it serves, −1 before any"),
        ("engine/{name}/in_flight", "requests", "that it answers"),
        ("engine/{name}/limit", "requests", "that it is given at once"),
        ("engine/{name}/failures", "failures", "since the stage began"),
        ("engine/{name}/restarts", "restarts", "since the stage began"),
        ("fleet/serving", "engines", "in service"),
        ("fleet/queued", "requests", "that wait"),
        ("fleet/retries", "requests", "asked again since the stage began"),
        ("fleet/failures/{class}", "failures", "since the stage began, by class of error"),
        ("perf/generated_tokens_per_s", "tokens/s", (
            "trained response tokens of the batch over `time/generate`; over `time/step` where generation runs ahead "
            "([async](async.md))"
        )),
        ("perf/generate_s/mean", "s", "that one trajectory took to generate"),
        ("perf/reward_s/mean", "s", "that its reward took to compute"),
    ),
    *_make(
        "evaluations",
        ("eval/{name}/avg@{k}", "", "mean reward over the samples of all prompts, k of each: the accuracy where rewards are 0 and 1"),
        ("eval/{name}/pass@{k}", "share", (
            "for k = 2, 4, 8, … up to `eval.samples_per_prompt`, where all rewards are 0 or 1: the probability that one of k samples "
            "is right, unbiased, over the prompts of which k samples were scored"
        )),
        ("eval/{name}/prompts", "prompts", "evaluated"),
        ("eval/{name}/failed", "samples", "that could not be generated or scored; they are in no mean"),
        ("eval/{name}/truncated/frac", "share", "scored samples that were cut at the token limit"),
        ("eval/{name}/response_length/mean", "tokens", "per scored sample"),
        ("eval/{name}/loss", "", "of held-out preferences: the loss"),
        ("eval/{name}/accuracy", "share", "pairs that are ranked right; a reward model's tie counts as one half"),
        ("eval/{name}/perplexity/{kind}", "", "of the `chosen` (or good) and the `rejected` responses: exp of the mean negative log-prob per token"),
        ("eval/{name}/{area}/{stat}", "", "another metric of the loss, on the held-out preferences"),
        ("eval/{name}/kto/desirable/frac", "share", "held-out samples that are desirable (`kto`)"),
        ("eval/{name}/ece", "share", "expected calibration error of a reward model"),
        ("eval/{name}/brier", "", "its Brier score, mean of (1 − p)²"),
        ("eval/{name}/nll", "nats", "its Bradley-Terry loss"),
    ),
)  # fmt: skip

ALIASES: Mapping[str, Mapping[str, str]] = {
    "trl": {
        "loss/total": "loss",
        "optim/lr": "learning_rate",
        "optim/grad_norm": "grad_norm",
        "reward/mean": "reward",
        "reward/part/{name}/mean": "rewards/{name}/mean",
        "groups/reward_std/mean": "reward_std",
        "groups/zero_std_frac": "frac_reward_zero_std",
        "kl/ref": "kl",
        "entropy/mean": "entropy",
        "clip_ratio": "clip_ratio/region_mean",
        "clip_ratio/low": "clip_ratio/low_mean",
        "clip_ratio/high": "clip_ratio/high_mean",
        "mismatch/logprob_abs_diff": "sampling/sampling_logp_difference/mean",
        "importance_weight/mean": "sampling/importance_sampling_ratio/mean",
        "importance_weight/max": "sampling/importance_sampling_ratio/max",
        "response_length/mean": "completions/mean_length",
        "response_length/min": "completions/min_length",
        "response_length/max": "completions/max_length",
        "truncated/frac": "completions/clipped_ratio",
        "time/step": "step_time",
    },
    "verl": {
        "loss/total": "actor/loss",
        "optim/lr": "actor/lr",
        "optim/grad_norm": "actor/grad_norm",
        "reward/mean": "critic/score/mean",
        "entropy/mean": "actor/entropy",
        "approx_kl/mean": "actor/ppo_kl",
        "kl/ref": "actor/kl_loss",
        "kl/coef": "actor/kl_coef",
        "clip_ratio": "actor/pg_clipfrac",
        "clip_ratio/dual": "actor/pg_clipfrac_lower",
        "mismatch_kl/mean": "rollout_corr/k3_kl",
        "mismatch/k1": "rollout_corr/kl",
        "mismatch/chi2": "rollout_corr/chi2_token",
        "truncated/frac": "response_length/clip_ratio",
        "value/mean": "critic/values/mean",
        "return/mean": "critic/returns/mean",
        "value/explained_variance": "critic/vf_explained_var",
        "time/step": "timing_s/step",
        "time/generate": "timing_s/gen",
        "time/train": "timing_s/update_actor",
        "time/weight_sync": "timing_s/update_weights",
    },
    "prime": {
        "loss/total": "loss/mean",
        "reward/mean": "reward/all/mean",
        "entropy/mean": "entropy/all/mean",
        "mismatch_kl/mean": "mismatch_kl/all/mean",
        "response_length/mean": "decode_len/all/mean",
        "response_length/min": "decode_len/all/min",
        "response_length/max": "decode_len/all/max",
        "truncated/frac": "is_truncated/all/mean",
        "time/generate": "time/generate_completions",
    },
}
"""Our names with theirs, by framework. Names that are the same in both, as `response_length/mean` and verl's, need none."""


def find_metric(name: str) -> MetricName | None:
    """The line of the table that a metric's name falls under, the one with the fewest braces; None for a name
    that is not ours.
    """
    found = [(len(pattern.groupindex), metric) for pattern, metric in _patterns() if pattern.fullmatch(name)]
    return min(found, key=lambda pair: pair[0])[1] if found else None


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], MetricName], ...]:
    return tuple((_compile(metric.name), metric) for metric in METRICS)


@cache
def _compile(name: str) -> re.Pattern[str]:
    """What a name with parts in braces matches; the parts are its groups."""
    pieces = re.split(r"\{([a-z]+)\}", name)
    for place in range(1, len(pieces), 2):
        pieces[place] = f"(?P<{pieces[place]}_>{'[0-9]+' if pieces[place] == 'k' else '[a-z0-9_]+'})"
    pieces[::2] = [re.escape(piece) for piece in pieces[::2]]
    return re.compile("".join(pieces))


def find_aliases(row: Mapping[str, Any], table: Mapping[str, str]) -> dict[str, float]:
    """The metrics of a row that have another name in `table`, under that name."""
    exact = {table[name]: value for name, value in row.items() if name in table}
    patterns = {name: alias for name, alias in table.items() if "{" in name}
    for name, value in row.items():
        for pattern, alias in patterns.items():
            match = _compile(pattern).fullmatch(name)
            if match:
                exact[
                    alias.format(
                        **{group.removesuffix("_"): text for group, text in match.groupdict().items()}
                    )
                ] = value
    return exact


def add_aliases(row: Mapping[str, Any], table: Mapping[str, str]) -> dict[str, Any]:
    """The row with its metrics under their names in `table` beside ours; a name that the row has already
    keeps its value.
    """
    return {**find_aliases(row, table), **row}


def make_table() -> str:
    """The table as Markdown, one line a metric."""
    lines = [
        f"| `{metric.name}` | {metric.unit or '–'} | {metric.stages} | {metric.meaning} |"
        for metric in METRICS
    ]
    return "\n".join(["| metric | unit | stage | meaning |", "|---|---|---|---|", *lines]) + "\n"
