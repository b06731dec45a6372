"""Whether learning without answers still goes well: signs of collapse in what is trained on, and the canary.

batch ─► observe: how its groups vote, and how that has changed since the first batches ─► metrics, for rules
candidate ─► accuracy on held-out prompts ─► judge: published, or refused
"""

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import field
from itertools import groupby

import numpy as np

from rollouts.config.online import OnlineConfig
from rollouts.rewards.library import EXTRACTS
from rollouts.types import Fields, JSONObject, Numbers, Sample, live, split_trajectories

FIRST = 5  # batches that later ones are compared with
WINDOW = 64  # prompts whose newest labels are compared


@live
class Guardrails:
    """What is known of the batches and publications so far."""

    config: OnlineConfig
    first: list[Numbers] = field(default_factory=list)  # metrics of the first batches
    labels: dict[str, str] = field(default_factory=dict)  # by prompt, the newest last
    best: float | None = None  # accuracy of what was published
    accuracies: dict[str, float] = field(default_factory=dict)  # of what was published, by weight version
    refused: int = 0  # candidates in a row
    rules: Fields = field(default_factory=dict)  # what each sign has seen

    def observe(self, samples: Sequence[Sample]) -> Numbers:
        """Metrics of a batch, of the answers that its samples give by `config.answer`; none is one too.

        online/vote_entropy: nats, of the answers of a group, mean over groups. online/distinct: answers that
        differ, as a share of the group. online/length: tokens of a response. online/label_share: of the
        newest labels of WINDOW prompts, each the commonest answer of a group, how many are the same.
        …/change: less the mean over the first batches, of the length as a share of it.
        """
        read = EXTRACTS[self.config.answer]
        ends = [segments[-1] for segments in split_trajectories(samples)]
        entropies, distinct = [], []
        for _, group in groupby(ends, lambda sample: sample.group_index):
            members = [*group]
            votes = Counter(str(read(one.response)) for one in members)
            shares = np.asarray([*votes.values()]) / len(members)
            entropies.append(-float(shares @ np.log(shares)))
            distinct.append(len(votes) / len(members))
            prompt = str(members[0].metadata["prompt_id"])
            self.labels.pop(prompt, None)
            self.labels[prompt] = votes.most_common(1)[0][0]
        self.labels = dict([*self.labels.items()][-WINDOW:])
        found = {
            "vote_entropy": float(np.mean(entropies)),
            "distinct": float(np.mean(distinct)),
            "length": float(np.mean([one.response_length for one in samples])),
            "label_share": max(Counter(self.labels.values()).values()) / len(self.labels),
        }
        metrics = {f"online/{name}": value for name, value in found.items()}
        if len(self.first) < FIRST:
            self.first.append(found)
            return metrics
        for name, value in found.items():
            before = float(np.mean([one[name] for one in self.first]))
            change = value / before - 1 if name == "length" else value - before
            metrics[f"online/{name}/change"] = change
        return metrics

    def judge(self, accuracy: float) -> bool:
        """Whether a candidate of this held-out accuracy may be published: it is no more than max_fall below
        the best that was, so that small falls do not add up.
        """
        # of rounding: a fall of just max_fall is none beyond it
        fits = self.best is None or accuracy >= self.best - self.config.max_fall - 1e-9
        self.refused = 0 if fits else self.refused + 1
        return fits

    @property
    def stops(self) -> bool:
        """Whether too many candidates in a row were refused."""
        return 0 < self.config.max_refused <= self.refused

    def note_published(self, accuracy: float, version: int) -> None:
        """Remembers the best, and how good the newest are that may be published again."""
        self.best = max(accuracy, accuracy if self.best is None else self.best)
        self.accuracies[str(version)] = accuracy
        self.accuracies = dict([*self.accuracies.items()][-WINDOW:])

    def state_dict(self) -> JSONObject:
        """Everything an exact resume needs, as JSON."""
        names = "first labels best accuracies refused rules"
        return {name: deepcopy(getattr(self, name)) for name in names.split()}

    def load_state_dict(self, state: Fields) -> None:
        """Goes on from a state_dict."""
        for name, value in state.items():
            setattr(self, name, value)
