"""What a critic adds to a step of RL: values before it, updates of its own within it. PPO is the RL loop with
a critic and advantage "gae".

batch ──► critic: V of every trained token ──► gae: advantages, returns ──► critic's updates, policy's updates
"""

from collections.abc import Sequence

from rollouts.loops.updates import Update, UpdateResult, last_pass_metrics, train
from rollouts.protocols import TrainingBackend
from rollouts.types import LossSpec

VALUE_CLIP = 0.2  # updates of a step that move a value further gain nothing by it, in the reward's unit
# of metrics that only a critic has; the others get the prefix "critic/"
OWN_NAMES = ("value/", "return/", "loss/value")


async def train_critic(critic: TrainingBackend | None, updates: Sequence[Update]) -> list[UpdateResult]:
    """The results of the critic's optimizer steps, on the same parts of the batch as the policy's and in the
    same order; empty without a critic.
    """
    if critic is None:
        return []
    loss = LossSpec("value", {"clip": VALUE_CLIP})  # a mean over the trained tokens of an update's rows
    return await train(critic, [(batch, loss) for batch, _ in updates])


def critic_metrics(results: Sequence[UpdateResult], minibatches: int) -> dict[str, float]:
    """The critic's metrics of the last pass over the batch; empty without a critic. value/explained_variance
    is of the values before each part's update.
    """
    metrics = last_pass_metrics(results, minibatches) if results else {}
    return {
        name if name.startswith(OWN_NAMES) else f"critic/{name}": value for name, value in metrics.items()
    }
