"""What is known about a run before it starts: everything that is wrong, at one look."""

from pathlib import Path

import numpy as np
import pytest
import trio
from safetensors.numpy import save_file

from rollouts.config.load import check_same_run, dump_config, load_config, load_recorded, training_digest
from rollouts.errors import ConfigError, ModelError
from rollouts.preflight import checks
from rollouts.preflight.checks import look_at_run
from rollouts.preflight.estimate import ModelSize, estimate_memory, read_free_memory, read_model_size
from rollouts.preflight.findings import Findings
from rollouts.preflight.functions import WRONG_ANSWER, call_functions, make_trial_samples
from rollouts.preflight.rows import PreparedRows
from rollouts.run_dir import RunDir
from tests.support.text_tables import cases, read_cells, write_jsonl
from tests.unit.chat_tokenizers import byte_tokenizer

RL = """
[rl]
steps = 1
data = { kind = "jsonl", path = "rl.jsonl" }
[rl.rollout]
reward = "r.py:score"
max_new_tokens = 10
"""
NO_REWARD = RL.replace('reward = "r.py:score"\n', "")
SFT = """
[sft]
steps = 1
max_length = 40
data = { kind = "jsonl", path = "sft.jsonl" }
"""
EVAL = """
[eval]
max_new_tokens = 10
data = { kind = "jsonl", path = "eval.jsonl" }
"""
PREFERENCE = '[preference]\nsteps = 1\nloss = "ipo"\ndata = { kind = "jsonl", path = "pairs.jsonl" }\n'
TEACHER = '[rl.distillation]\nteacher = "http://127.0.0.1:9"\n'
FILTERS, CALLED = 'filters = ["r.py:keep"]\n', EVAL + 'reward = "r.py:score"\n'


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A directory with a config, its rows, a reward and a model directory of 40 positions."""
    write_files(tmp_path, {"model/config.json": '{"max_position_embeddings": 40}', "r.py": SCORE})
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model/model.safetensors")
    write_jsonl(tmp_path / "rl.jsonl", {"prompt": "a", "answer": "b"}, {"prompt": "bcd"}, {"prompt": "held"})
    write_jsonl(tmp_path / "sft.jsonl", {"prompt": "q", "answer": "ab"})
    write_jsonl(tmp_path / "eval.jsonl", {"prompt": "held", "answer": "c"}, {"prompt": " HELD "})
    write_jsonl(tmp_path / "pairs.jsonl", {"prompt": "q", "chosen": "ab", "rejected": "cd"})
    monkeypatch.setattr("rollouts.models.load.resolve_model", lambda name, **_: Path(name))
    monkeypatch.setattr("rollouts.models.load.load_tokenizer", lambda path, **_: byte_tokenizer())
    monkeypatch.setattr(checks, "check_loss", lambda section: ())
    return tmp_path


SCORE = """
async def score(sample):
    return float(sample.response == sample.metadata['answer'])
async def keep(group):
    return group.rewards.max() > 1
def curriculum(step, statistics):
    return {name: step / 2 for name in statistics}
"""


def load(house, text, *options):
    (house / "run.toml").write_text(text)
    return load_config(house / "run.toml", ["--model.name", str(house / "model"), *options])


def look_at(house, text, stages=("rl",), *options):
    config, findings, place = load(house, text, *options), Findings(), RunDir(house / "run")
    return look_at_run(config, stages, place, findings, local_ranks=1), findings


def look(house, *settings):
    """What is wrong."""
    _, findings = look_at(house, *settings)
    return [f"{subject}: {message}" for level, subject, message in findings if level != "ok"]


GOOD = r"""
eval.data: 1 rows, 1 left out because they are asked twice
sft.data: 1 rows
rl.data: 2 rows, 1 left out because they are held out by eval.data
rl.rollout.reward: {house}/r.py:score
rl.rollout.filters: {house}/r.py:keep
model.name: {house}/model
rl.data: the first prompt reads '<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n'
rl.rollout.max_new_tokens: the longest prompt has 22 tokens, with max_new_tokens=10 that is 32 of 40
eval.max_new_tokens: the longest prompt has 23 tokens, with max_new_tokens=10 that is 33 of 40
sft.max_length: the longest row, in tokens: 24 of 40
memory: not estimated: config.json or the weight files do not say how large the model is
eval: work: 1 prompts x 1 samples each time, at most 10 tokens
"""


def test_a_good_run_has_findings_and_no_error(house):
    masked = RL.replace("[rl.rollout]", "mask_truncated = true\n[rl.rollout]")
    run, _ = look_at(house, SFT + masked + FILTERS, ("sft", "rl"))
    assert [filter_.__name__ for filter_ in run.functions.filters] == ["keep", "check_some_complete"]
    _, findings = look_at(house, SFT + RL + FILTERS + EVAL, ("sft", "rl"))
    # a prompt of n letters takes 8 + n tokens and the assistant's header 11
    said = {f"{level} {subject}: {message}" for level, subject, message in findings}
    assert said >= {f"ok {line}" for line in GOOD.format(house=house).strip().splitlines()}
    assert all(line.startswith("ok ") for line in said)


EVERYTHING = """
eval.data | no such file
sft.data | no [sft] table
rl.rollout.reward | takes (sample, engine)
rl.rollout.filters | has no kep
rl.advantage | 'groo' does not name a function; write a name of grpo
preference.loss | loss='ipo' is not known
rl.loss | loss='ppo_clip' is not known
model.name | is not the config.json of a model directory
"""


def test_everything_that_is_wrong_is_found_at_one_look(house, monkeypatch):
    def refuse(section):
        raise ConfigError(f"loss={section.loss!r} is not known")

    (house / "eval.jsonl").unlink()
    (house / "r.py").write_text("def score(sample, engine):\n    return 1.0\n")
    (house / "model/config.json").write_text("{")
    monkeypatch.setattr(checks, "check_loss", refuse)
    text = RL.replace("[rl.rollout]", 'advantage = "groo"\n[rl.rollout]') + 'filters = ["r.py:kep"]\n'
    found = look(house, PREFERENCE + text + EVAL, ("sft", "preference", "rl"))
    for line, (subject, message) in zip(found, read_cells(EVERYTHING), strict=True):
        assert line.startswith(f"{subject}: ") and message in line, line


def make_text(name):
    """The config of a case: its tables, and what is added to them."""
    start, _, added = name.partition(", ")
    text = "".join(globals()[part] for part in start.split(" + "))
    if added.startswith("max_bad"):
        return text.replace('"rl.jsonl"', f'"rl.jsonl", {added}')
    return text.replace("[rl.rollout]", added.replace(", ", "\n") + "\n[rl.rollout]")


@cases("""
prompts | text      | wrong
held | RL + EVAL | rl.data: rl.data has no row left: all of its prompts are held
a;xxxxxxxxxxxx | RL | rl.rollout.max_new_tokens: the longest prompt has 31 tokens, with max_new_tokens=10
3;3;p;p;p;p;p;p;p;p;p;p;p;p;p;p;p;p;p;p | RL, max_bad_fraction = 0.25 | rl.data: 2 malformed rows are skipped:
q | RL, advantage = "opo", advantage_params = { k = 2 } | rl.advantage: advantage 'opo' has no parameter 'k'
q | NO_REWARD | rl.rollout.reward is empty; name a function of one sample as
q | NO_REWARD + EVAL | eval.reward: eval.reward is empty; name a function
q | NO_REWARD + TEACHER + EVAL | file.py:function, or rl.rollout.reward, which [eval] takes too
""")
def test_what_is_wrong_with_rows_and_settings_of_rl_is_found(house, prompts, text, wrong):
    prompts = (int(prompt) if prompt.isdigit() else prompt for prompt in prompts.split(";"))
    write_jsonl(house / "rl.jsonl", *({"prompt": prompt} for prompt in prompts))
    assert wrong in "\n".join(look(house, make_text(text)))


@cases("""
limit | wrong
40    | sft.data: 1 responses are cut at max_length=40
60    | sft.max_length: the longest row, in tokens: 60, more than the
""")
def test_conversations_that_are_too_long_are_found(house, limit: int, wrong):
    write_jsonl(house / "sft.jsonl", {"prompt": "q", "answer": "x" * 50})
    assert wrong in "\n".join(look(house, SFT.replace("= 40", f"= {limit}"), ("sft",)))


def test_the_sources_of_a_mixture_are_listed_with_their_shares(house):
    write_jsonl(house / "more.jsonl", {"prompt": "x"}, {"prompt": "y"})
    one, other = (f'{{ kind = "jsonl", path = "{name}.jsonl", weight = ' for name in ("rl", "more"))
    text = RL.replace('{ kind = "jsonl", path = "rl.jsonl" }', f"[{one} 1.0 }}, {other} 3.0 }}]")
    said = "5 rows: rl 3 rows (25% of the draws), more 2 rows (75% of the draws)"
    assert said in [found.message for found in look_at(house, text)[1]]
    (house / "more.jsonl").unlink()
    (problem,) = look(house, text)
    assert "rl.data.1" in problem


# --- epochs -------------------------------------------------------------------------------------------------


@cases("""
epochs | sizes | drawn | steps | …
1    | 30  | 4  | 8 | each row once at least
2    | 3   | 2  | 3 | and a batch may reach into the next epoch
0.25 | 30  | 4  | 2 | 1.875
1.1  | 10  | 11 | 1 | 11 rows and no more, as 1.1 is meant: in binary 1.1 * 10 is above 11
2    | 3 5 | 4  | 4 | a mixture: as many draws as both have rows, whatever their weights
""")
def test_epochs_are_passes_over_the_rows_rounded_up_to_whole_steps(house, epochs, sizes, drawn, steps):
    text = f"[sft]\nepochs = {epochs}\nbatch_size = {drawn}\n"
    for size in sizes.split():
        write_jsonl(house / f"{size}.jsonl", *({"prompt": str(n), "answer": "a"} for n in range(int(size))))
        text += f'[[sft.data]]\nkind = "jsonl"\npath = "{size}.jsonl"\nweight = {size}.0\n'
    run, findings = look_at(house, text, ("sft",))
    assert (run.config.sft.steps, run.config.sft.epochs) == (int(steps), 0)
    assert f"\n{steps} steps of {drawn} samples" in "\n".join(found.message for found in findings)


def test_an_epoch_has_the_prompts_and_pairs_that_are_not_held_out(house):
    write_jsonl(house / "pairs.jsonl", *({"prompt": n, "chosen": "ab", "rejected": "cd"} for n in "abcdefg"))
    text = RL.replace("steps = 1", "epochs = 3").replace("reward =", "num_prompts = 4\nreward =") + EVAL
    text += PREFERENCE.replace("steps = 1", "epochs = 1\nheld_out = 3\nbatch_size = 3")
    config = look_at(house, text, ("preference", "rl"))[0].config
    assert config.rl.steps == 2  # 3 times 2 prompts, 4 a step
    assert config.preference.steps == 2  # of 4 pairs, 3 a step


def test_a_resumed_run_goes_on_by_the_same_file_and_warns_of_other_rows(house):
    text = RL + SFT.replace("steps = 1", "epochs = 3\nbatch_size = 1")
    config, recorded = look_at(house, text, ("sft",))[0].config, house / "run/config.toml"
    write_files(house, {"run/config.toml": dump_config(config)})
    check_same_run(load_recorded(recorded), load(house, text))
    assert training_digest(config) == training_digest(load(house, text))
    assert look(house, text, ("sft",)) == []
    write_jsonl(house / "sft.jsonl", {"prompt": "q", "answer": "ab"}, {"prompt": "r", "answer": "ab"})
    (changed,) = look(house, text, ("sft",))
    assert "sft.epochs: 3 epochs of 2 rows, 1 a step, are 6 steps; at the last start they were 3" in changed
    assert look_at(house, text, ("rl",))[0].config.sft == config.sft  # a stage that does not run now
    (house / "sft.jsonl").unlink()
    (missing,) = look(house, text, ("sft",))
    assert missing.startswith("sft.data: ")


# --- functions ----------------------------------------------------------------------------------------------


@cases("""
key
rl.rollout.generate
rl.rollout.reward
rl.rollout.group_reward
rl.rollout.filters
rl.curriculum
rl.advantage
eval.reward
sft.data.function
eval.data.function
""")
def test_every_function_that_is_missing_or_wrong_is_found(house, key):
    (house / "r.py").write_text("number = 3\ndef reward(*, needed): ...\n")
    data = '{ kind = "python", function = "r.py:rows", size = 1 }'
    text = f"[sft]\nsteps = 1\ndata = {data}\n{RL}[eval]\ndata = {data}\n"
    for name, wanted in read_cells("""
        gone.py:reward | there is no file
        r.py:rewardx   | did you mean reward?
        r.py:number    | it must be a function
        r.py:reward    | is called with"""):
        value = f'["{house}/{name}"]' if "filters" in key else f"{house}/{name}"
        alone = ["--rl.rollout.reward", ""] if "group" in key else []
        found = look(house, text, ("sft", "rl"), f"--{key}", value, *alone)
        assert any(wanted in line for line in found if line.startswith(key.removesuffix(".function"))), found


# --- a trial call -------------------------------------------------------------------------------------------


SOURCES = {
    "good": SCORE,
    "raises": SCORE.replace("'answer'", "'gold'"),
    "endless": "import trio\n" + SCORE.replace("return group", "await trio.sleep_forever(); return group"),
}
ANSWERS = """
good | ok eval.reward: called with the response 'c': 1
good | ok rl.rollout.reward: called with the response 'b': 1
good | ok rl.rollout.filters: keep drops (keep) a group of these two
good | ok rl.rollout.ranker: reward_std gives 0.5 to a group of these two
raises | error eval.reward: reward function score
raises | error rl.rollout.reward: reward function score
endless | ok eval.reward:
endless | ok rl.rollout.reward:
endless | error rl.rollout.filters: filter keep on group 0 (prompt row-0) took long
"""


@cases("kind", SOURCES)
def test_functions_are_called_once_and_their_answers_shown(house, kind):
    (house / "r.py").write_text(SOURCES[kind])
    text = RL.replace("steps = 1", 'steps = 1\ncurriculum = "r.py:curriculum"') + FILTERS
    text += 'ranker = "reward_std"\nover_sampling = 2.0\n' + CALLED
    text = text.replace("[rl.rollout]", "[rl.rollout]\nreward_timeout_s = 0.2")
    run, findings = look_at(house, text)[0], Findings()
    trio.run(lambda: call_functions(run.config, run.functions, run.rows, findings))
    lines = [f"{level} {subject}: {message}" for level, subject, message in findings]
    said = [start for name, start in read_cells(ANSWERS) if name == kind]
    assert all(line.startswith(start) for line, start in zip(lines, said, strict=False)), lines


def test_a_reward_of_conversations_is_called_with_one():
    samples = make_trial_samples([{"prompt": "2 * 3", "answer": 6}], turns=True)
    said = [[message["content"] for message in sample.metadata["messages"]] for sample in samples]
    assert said == [["2 * 3", "6"], ["2 * 3", WRONG_ANSWER]]


# --- estimates ----------------------------------------------------------------------------------------------


def test_the_size_of_a_model_is_read_without_its_weights(tmp_path):
    weights = {"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float32)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    settings = """{"hidden_size": 8, "num_attention_heads": 4, "num_hidden_layers": 2,
        "intermediate_size": 16, "num_key_value_heads": 2}"""
    (tmp_path / "config.json").write_text(settings)
    expected = ModelSize(parameters=17, layers=2, hidden=8, inner=16, query=8, key_value=4)
    assert read_model_size(tmp_path) == expected
    (tmp_path / "config.json").write_text("{}")
    assert read_model_size(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        read_model_size(tmp_path)


def write_files(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def test_free_memory_is_the_least_of_the_machines_and_of_every_control_groups_around_the_process(tmp_path):
    assert read_free_memory(tmp_path) is None
    write_files(tmp_path, {"proc/meminfo": "MemTotal:       9000 kB\nMemAvailable:    5000 kB\n"})
    assert read_free_memory(tmp_path) == 5000 * 1024
    job = "sys/fs/cgroup/batch/job"
    write_files(tmp_path, {
        "proc/self/cgroup": "0::/batch/job/step\n",
        f"{job}/step/memory.max": "max\n", f"{job}/step/memory.current": "700\n",
        f"{job}/memory.max": "1000\n", f"{job}/memory.current": "900\n",
        f"{job}/memory.stat": "anon 300\ninactive_file 600\nactive_file 1\n",
        "sys/fs/cgroup/batch/memory.max": "4000\n", "sys/fs/cgroup/batch/memory.current": "3500\n",
        "sys/fs/cgroup/other/memory.max": "1\n", "sys/fs/cgroup/other/memory.current": "1\n",
    })  # fmt: skip
    assert read_free_memory(tmp_path) == 500  # of batch; job has 1000 - (900 - 600)
    write_files(tmp_path, {"sys/fs/cgroup/batch/memory.max": "9000\n"})
    assert read_free_memory(tmp_path) == 700
    write_files(tmp_path, {f"{job}/memory.current": "2000\n"})
    assert read_free_memory(tmp_path) == 0


MEMORY = """
about 20.1 MiB when every sample has its full length, an estimate: 4 MiB weights 4 x 1.049M,
4 MiB gradients as much, 8 MiB AdamW twice that
0.00781 MiB keys and values 8 x 2 rows x 16 tokens x 2 layers x 16
0.14 MiB activations 26 tokens x 5.5 KiB
1 MiB are free: lower micro_batch_tokens or engine.max_rows, or set model.gradient_checkpointing
"""


def test_memory_is_the_sum_of_its_parts(house, monkeypatch):
    text = RL.replace("[rl.rollout]", "kl_coef = 0.1\n[rl.rollout]\nnum_prompts = 1\nsamples_per_prompt = 2")
    config = load(house, text, "--output.checkpoint_every", "1")
    size = ModelSize(parameters=2**20, layers=2, hidden=32, inner=64, query=32, key_value=16)
    rest = "rl", PreparedRows(longest_prompt=6), size, None
    monkeypatch.setattr("rollouts.preflight.estimate.read_free_memory", lambda: 2**20)
    (memory,) = estimate_memory(config, *rest)
    # weights, gradients and the reference 4 MiB each, AdamW 8; keys and values 8*2*16*2*16 bytes = 8 KiB; a
    # token 4*6*32 + 2 * 4*(6*32 + 3*32 + 4*16 + 4*64) bytes = 5.5 KiB, of which there are 6 of the prompt and
    # 2*10 of the samples
    assert all(part in memory.message for part in MEMORY.strip().splitlines())
    assert memory.level == "warning"
    (memory,) = estimate_memory(load(house, text, "--rl.kl_limit", "0.1"), *rest)
    assert "about 32.1 MiB" in memory.message and "12 MiB a copy of weights and moments" in memory.message
