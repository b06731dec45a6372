"""A manager on a scripted engine, for the tests of what it does with groups."""

import copy
import dataclasses
import json

from rollouts.config.rollout import RolloutConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.generate import make_chat_generate
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply
from rollouts.types import FilterDecision, SamplingParams, metric_values
from tests.sim.fakes import RecordingBuffer
from tests.support.fake_tokenizer import FAKE_END, FakeTokenizer

SAMPLING = SamplingParams(max_new_tokens=8, stop_token_ids=(FAKE_END,))
ROWS = [{"prompt": f"question {index}", "answer": str(index)} for index in range(40)]
STREAM = [prompt.key for prompt in DataBuffer(ROWS, seed=0).get_prompts(120)]
chat_generate = make_chat_generate(FakeTokenizer())


def group_of(name):
    return int(name[1:9])


def member_of(name):
    return int(name[11:14])


def say(text="ab", token_s=1.0):
    """Every request is answered with `text`, from where it was cut; `token_s` may depend on its id."""
    return lambda request: ScriptedReply(
        text[sum(map(int, request.request_id.split("@")[1:])) :],
        token_s(request.request_id) if callable(token_s) else token_s,
    )


async def index_reward(sample):
    """0, 1, 2, … within the group."""
    return float(member_of(sample.id))


def fail_on(error, *sample_ids):
    """A reward function that fails for these samples, or for all."""

    async def broken_reward(sample):
        if not sample_ids or sample.id in sample_ids:
            raise error
        return await index_reward(sample)

    return broken_reward


def keep_groups(*kept):
    async def chosen(group):
        return FilterDecision(group.group_index in kept, "not_chosen")

    return chosen


@dataclasses.dataclass
class Run:
    """A manager with its parts, and the trainer's version."""

    manager: AsyncRolloutManager
    recorder: RecordingBuffer
    engine: ScriptedEngine
    version: list[int]

    async def take(self):
        """The groups of the next batch."""
        return groups_of(await self.manager.generate_batch())

    def advance(self, trainer, engine=None):
        """Versions of the trainer and of the engine (default: the trainer's)."""
        self.version[0], version = trainer, trainer if engine is None else engine
        self.engine.set_version(version)
        self.manager.engines_updated(version)

    def metrics(self):
        return metric_values(self.manager.batch_metrics())

    def count(self, name):
        return self.manager.statistics().get(name, 0.0)

    def books(self):
        """Where every group is, without the places that have none."""
        places = ("drawn", "trained", "held", "in_flight", "dropped/", "failed/")
        found = self.manager.statistics().items()
        return {name: n for name, n in found if n and name.startswith(places) and name[:5] != "held/"}

    def upcoming(self, count):
        """The prompts that would be drawn next."""
        return [prompt.key for prompt in copy.deepcopy(self.recorder.buffer).get_prompts(count)]

    def save(self):
        return json.dumps([self.recorder.buffer.state_dict(), self.manager.state_dict()])

    def check_prompts(self, trained):
        """Trained, held, or still to come: every prompt of the stream is in one place. For runs whose filters
        drop nothing, between draws.
        """
        self.manager.check_ledger()
        state = self.manager.state_dict()
        held = [(one["epoch"], one["prompt_id"]) for one in [*state["held"], *state["unfinished"]]]
        everywhere = [*trained, *held, *self.upcoming(30)]
        assert sorted(everywhere) == sorted(STREAM[: len(everywhere)])
        assert sorted(self.recorder.out) == sorted(trained + held)


def make_run(
    script=None,
    *,
    state=None,
    version=0,
    rows=ROWS,
    **options,
):
    """Two groups of two, of the reward index_reward. `options` are settings of the rollouts and of the
    manager; `state` is what another run saved.
    """
    options = {"num_prompts": 2, "samples_per_prompt": 2, "over_sampling": 1.0} | options
    names = (RolloutConfig.model_fields.keys() & options.keys()) - {
        "filters",
        "reward",
        "group_reward",
        "generate",
        "ranker",
    }
    config = RolloutConfig(**{name: options.pop(name) for name in names})
    recorder, trainer = RecordingBuffer(DataBuffer(rows, seed=0), set()), [version]
    engine = options.pop("engine", None) or ScriptedEngine(script or say(token_s=0.0), version=version)
    settings = {"sampling": SAMPLING, "generate": chat_generate, "reward": index_reward, "seed": 1} | options
    manager = AsyncRolloutManager(
        recorder, engine, config=config, policy_version=lambda: trainer[0], **settings
    )
    run = Run(manager, recorder, engine, trainer)
    if state is not None:
        of_buffer, of_manager = json.loads(state)
        recorder.buffer.load_state_dict(of_buffer)
        recorder.out |= set(STREAM) - set(run.upcoming(len(STREAM)))
        manager.load_state_dict(of_manager)
    return run


def groups_of(batch):
    return list(dict.fromkeys(batch.group_indices.tolist()))


def prompts_of(batch):
    return list(dict.fromkeys((row["epoch"], row["prompt_id"]) for row in batch.metadata))
