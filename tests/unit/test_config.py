"""The config: TOML and flags in, frozen settings or one message with every problem out."""

import re
import shlex
from pathlib import Path

import pytest

from rollouts.config.explain import config_keys, describe_unknown_key, explain_config
from rollouts.config.load import check_same_run, dump_config, load_config, load_recorded, training_digest
from rollouts.config.plugins import load_function
from rollouts.config.schema import RunConfig
from rollouts.config.spelling import ALIASES, REMOVED
from rollouts.data.curriculum import SourceStatistics
from rollouts.errors import ConfigError, RunDirError
from tests.support.text_tables import cases

RL = """
[rl]
steps = 4
data = { kind = "jsonl", path = "train.jsonl" }
[rl.rollout]
reward = "rewards.py:score"
"""
SFT = """
[sft]
steps = 3
data = { kind = "jsonl", path = "sft.jsonl" }
"""


@pytest.fixture
def write(tmp_path):
    path = tmp_path / "run.toml"
    return lambda text: (path.write_text(text), path)[1]


@pytest.fixture
def load(write):
    return lambda text, *overrides: load_config(write(text), overrides)


def problems_of(path, overrides=()):
    """The lines of the message, without the file's name and line in front."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    first, *others = str(caught.value).splitlines()
    return [re.sub(rf"^{re.escape(str(path))}(:\d+)?: ", "", line.strip()) for line in others or [first]]


# --- values -------------------------------------------------------------------------------------------------


def test_an_empty_file_is_the_defaults(load):
    assert load("") == RunConfig()


def test_a_whole_number_is_a_number_but_text_is_not(write, load):
    config = load(RL.replace("steps = 4", "steps = 4\nclip_low = 1"))
    assert config.rl.clip_low == 1.0
    assert problems_of(write(SFT.replace("3", '"8"'))) == ['sft.steps = "8": Input should be a valid integer']


def test_an_sft_optimizer_table_that_leaves_lr_out_keeps_the_sft_default(load):
    config = load(SFT + "[sft.optim]\nwarmup_steps = 2\n")
    assert (config.sft.optim.lr, config.sft.optim.warmup_steps) == (1e-4, 2)
    config = load(SFT + "[sft.optim]\nlr = 0.5\n")
    assert config.sft.optim.lr == 0.5


def test_the_word_none_switches_off_a_nullable_number(load):
    config = load(RL + '[rl.optim]\nmax_grad_norm = "none"\n')
    assert config.rl.optim.max_grad_norm is None
    assert load(RL, "--rl.optim.max_grad_norm", "none") == config


# --- flags --------------------------------------------------------------------------------------------------


def test_flags_are_read_as_their_setting_asks(load):
    flags = """--name 8 --deterministic true --seed 3 --rl.optim.lr 1e-6 --rl.clip_high=1
        --rl.rollout.filters '["a", "b"]' --rl.loss_params.x 3 --rl.loss_params.mode hard
        --rl.data.params.deep.list '[1, 2]' --rl.data.system_prompt '"quoted = yes"' --model.autocast off
        --model.gradient_checkpointing True"""
    config = load(RL, *shlex.split(flags))
    assert (config.name, config.deterministic, config.seed, config.model.autocast) == ("8", True, 3, "off")
    assert config.model.gradient_checkpointing is True
    assert (config.rl.optim.lr, config.rl.clip_high, config.rl.rollout.filters) == (1e-6, 1.0, ["a", "b"])
    assert config.rl.loss_params == {"x": 3, "mode": "hard"}
    assert config.rl.data[0].params == {"deep": {"list": [1, 2]}}
    assert config.rl.data[0].system_prompt == "quoted = yes"


def test_every_alias_points_to_settings_that_exist():
    assert len(ALIASES) >= 80
    assert [key for ours, _ in ALIASES.values() for key in ours if key not in config_keys()] == []
    assert [name for name in ALIASES if name in config_keys()] == []  # a setting of ours is no foreign name


@cases("""
of_rl                              | of_rollouts | rule
kl_coef = 0.1; kl_estimator = "k3" | | rl: kl_estimator='k3' with kl_in='reward'
kl_coef = 0.1; kl_in = "loss"      | | rl: kl_estimator='k1' with kl_in='loss'
kl_ref_limit = 0.1                 | | rl: kl_ref_limit with kl_coef=0
kl_coef = 0.1; kl_estimator = "exact" | | rl: kl_estimator='exact' with kl_in='reward'; KL in the reward is k1
EXACT | [reference]; dtype = "4bit" | rl.kl_estimator='exact' with reference=
EXACT | [reference]; where = "http://h:1" | rl.kl_estimator='exact' with reference=
EXACT | [reference]; update = "reset(every=1)" | rl.kl_estimator='exact' with reference=
EXACT | [model.lora]                | rl.kl_estimator='exact' with reference=
EXACT | [distributed]; ranks = 2    | rl.kl_estimator='exact' with reference=
changes = { from_step = 2, EXACT } | [reference]; dtype = "8bit" | rl.kl_estimator='exact' with reference=
max_staleness = 1                  | | engine.mode='shared' with rl.sync_every=1, rl.max_staleness=1
sync_every = 3                     | | rl: max_staleness=0 is below sync_every - 1 = 2
loss = "gspo"; clip_low = 0.1      | | rl: clip_low=0.1 with loss='gspo'
advantage = "gae"                  | | rl: advantage='gae' without a critic
kl_control = "fixed("              | | rl: 'fixed(' is not of the form name
epochs = 0.5                       | | rl: steps=4 and epochs=0.5; set one of the two, and the other to 0
changes = { from_step = 2 }        | | rl: changes with from_step=2 changes nothing
| group_reward = "rewards.py:rank" | rl: rollout.group_reward beside rollout.reward
| rewards.a.group_reward = "final" | rl: rollout.rewards beside rollout.reward, group_reward, reward_model
| environment = "a:b"; agent = "b" | rl: rollout.generate, rollout.environment and rollout.agent each make the
| tools = ["a.py:add"]; agent = "b" | rl: rollout.tools are of a conversation that this run leads
| replay = 1 | rl: rollout.replay=1 with max_staleness=0
| ranker = "reward_std" | rl: rollout.ranker='reward_std' with rollout.over_sampling=1, which leaves
max_staleness = 1 | ranker = "reward_std"; over_sampling = 2.0; [engine]; mode = "copied" \
| rl: rollout.ranker='reward_std' with max_staleness=1; the groups of a batch
""")
def test_a_combination_that_cannot_work_is_refused(write, of_rl, of_rollouts, rule):
    """Among others: samples are scored one by one or by group, one thing makes the trajectories, groups train
    again only where samples may be old, and a ranker needs groups that compete.
    """
    exact = 'kl_coef = 0.1; kl_in = "loss"; kl_estimator = "exact"'
    of_rl = of_rl.replace("EXACT", exact.replace("; ", ", " if "{" in of_rl else "; "))
    text = RL.replace("steps = 4", f"steps = 4; {of_rl}") + of_rollouts
    (problem,) = problems_of(write(text.replace(";", "\n")))
    assert problem.startswith(rule)


# --- what is wrong ------------------------------------------------------------------------------------------

WORDS = {"LONG": "x" * 300, "DEEP": "x/" * 2048, "BYTES": "\udc80"}


@cases("""
flags                            | problems
--seed "1\\nname = \'x\'"        | --seed: seed =
--eval.temperature 0.5           | --eval.temperature: the file has no [eval] table
--rl.optim.lr true               | --rl.optim.lr: rl.optim.lr = true
--rl.rollout.num_prompts many    | --rl.rollout.num_prompts: rl.rollout.num_prompts = "many"
--rl.loss_params.x [3]           | --rl.loss_params.x: rl.loss_params.x = [3]
--seed --name x stray            | --seed: has no value / stray: a stray word
--rl.optim 3                     | --rl.optim: rl.optim is a table
--rl.data.5.path x               | --rl.data.5.path: rl.data has 1 tables in the file
--rl.data.0.pth x                | --rl.data.0.pth: unknown key rl.data.0.pth; did you mean rl.data.path
--rl.rollout.filters check       | --rl.rollout.filters: rl.rollout.filters = "check"
--rl.data.path LONG.jsonl        | --rl.data.path: rl.data.path
--model.name ./LONG              | --model.name: model.name
--rl.rollout.reward LONG.py:score | --rl.rollout.reward: rl.rollout.reward
--output.dir runs/LONG           | --output.dir: output.dir
--output.dir DEEP                | --output.dir: output.dir
--rl.data.path ~nobody-of-this-name/x.jsonl | --rl.data.path: rl.data.path
--name \'"a\\u0000b"\'            | --name: name
--rl.loss_params.x \'"a\\u0000b"\' | rl.loss_params: the text
--name BYTES                     | --name: name
""")
def test_a_wrong_flag_is_named_with_its_key(write, flags, problems):
    words = [re.sub("LONG|DEEP|BYTES", lambda found: WORDS[found[0]], word) for word in shlex.split(flags)]
    starts = problems.split(" / ")
    found = problems_of(write(RL), words)
    assert [line[: len(start)] for line, start in zip(found, starts, strict=True)] == starts


def test_an_address_with_a_password_is_refused_before_it_is_in_a_record_and_not_shown(write):
    flags = ["--engine.kind", "vllm", "--engine.urls", '["http://user:hunter2@host:1"]']
    found = problems_of(write(RL), [*flags, "--reference.where", "http://user:hunter2@host:2"])
    for key in ("engine.urls", "reference.where"):
        assert f"{key} has an address with a user or a password, which the record would show" in found
    assert "hunter2" not in str(found)


def test_all_problems_of_a_file_are_listed_one_a_line(write):
    text = """
    deterministic = 1
    [model]
    autocast = "bflot16"
    [sft]
    steps = -1
    data = { kind = "jsonl" }
    [rl]
    kl_coef = inf
    data = { kind = "csv", path = "x" }
    rollout = { temperature = 0, filters = [3], max_failed_fraction = 2 }
    [rll]
    """
    found = problems_of(write(text))
    starts = [
        "deterministic = 1: ", 'model.autocast = "bflot16": ', "sft.data: path is missing",
        "sft.steps = -1: ", "rl.kl_coef = Infinity: ", 'rl.data.kind = "csv": ',
        "rl.rollout.temperature = 0: ", "rl.rollout.filters.0 = 3: ", "rl.rollout.max_failed_fraction = 2: ",
        "unknown key rll; did you mean rl?",
    ]  # fmt: skip
    assert [next((start for start in starts if line.startswith(start)), line) for line in found] == starts
    assert "did you mean bfloat16?" in found[1]


@cases("content", [None, b"x = ", b"\xff = 1", b"x = 1\nx = 2", b"a" + b".a" * 10_000 + b" = 1"])
def test_a_file_that_is_no_toml_is_named(tmp_path, content):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        load_config(path)


@cases("""
wrong                       | right
rl.rollout.group_size       | rl.rollout.samples_per_prompt
rl.rollout.num-prompts      | rl.rollout.num_prompts
rl.optim.learning_rate      | rl.optim.lr
rl.lr                       | rl.optim.lr
rl.temperture               | rl.rollout.temperature
rl.rolout.num_prompts       | rl.rollout.num_prompts
eval.data.pth               | eval.data.path
eval.rollout.temperature    | rl.rollout.temperature
actor_rollout_ref.rollout.n | rl.rollout.samples_per_prompt
data.train_batch_size       | rl.rollout.num_prompts
algorithm.kl_ctrl.kl_coef   | rl.kl_coef
NUM_GENERATIONS             | rl.rollout.samples_per_prompt
trainer.save_freq           | output.checkpoint_every
eval.zzzzzz                 | eval.data
""")
def test_a_wrong_key_gets_the_right_one_suggested(wrong, right):
    assert right in describe_unknown_key(wrong).partition("did you mean ")[2].split("?")[0].split(" (")[
        0
    ].split(" or ")


def test_a_setting_that_is_gone_is_refused_with_what_replaces_it_and_left_out_of_old_records(write):
    key, text = "reference.server_model", '[reference]\nserver_model = "policy"\n'
    assert problems_of(write(text)) == [f"{key} is no setting any more: {REMOVED[key]}"]
    assert load_recorded(write("seed = 3\n" + text)) == RunConfig(seed=3)


def test_what_replaces_a_setting_that_is_gone_has_its_recorded_value(write, load):
    algorithm = """steps = 4
recompute_old = true
importance_cap = 3.0
kl_coef = 0.1
kl_control = "two_sided"
kl_control_params = { target = 1.0, tolerance = 0.5 }
changes = { from_step = 3, kl_coef = 0.2 }
"""
    text = RL.replace("steps = 4\n", algorithm).replace(
        '"jsonl", path = "train.jsonl"', '"hf", dataset = "a/b", subset = "c"'
    )
    text += """[rl.optim]
beta1 = 0.9
[reference]
where = "process"
update = "ema"
every = 2
policy_weight = 0.5
"""
    config = load_recorded(write(text))
    assert config.rl.kl_control == "two_sided(target=1.0, tolerance=0.5)"
    assert config.rl.loss_params == {"importance_cap": 3.0}
    assert config.rl.data[0].dataset == "a/b:c"
    assert config.reference.rule() == (0.5, 2)
    assert load(dump_config(config)) == config
    assert config.rl.changes[0].model_fields_set == {"kl_coef", "from_step"}


def test_the_explanation_has_every_setting_once_and_there_are_few():
    text = explain_config()
    shown = re.findall(r"^- `([a-z0-9_.]+)` = `.*\(", text, re.MULTILINE)
    assert len(shown) == len(set(shown)) <= 168
    assert text.endswith(f"\n{len(shown)} settings\n")
    names = {key.rpartition(".")[2] for key in shown}
    for key in config_keys().values():
        assert f"[{key.key}]" in text if key.section else key.name in names, key.key
        assert key.meaning, key.key
    assert "1e-06 in [preference.optim]" in text
    assert "- `rl.steps` = `0`: training steps" in explain_config("rl")
    with pytest.raises(ConfigError, match="did you mean"):
        explain_config("rl.temprature")


def test_the_page_of_settings_is_what_the_schema_says():
    page = Path(__file__).resolve().parents[2] / "docs" / "config.md"
    assert page.read_text() == explain_config(), "python -m rollouts explain > docs/config.md"


# --- paths --------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The working directory, which is not the file's."""
    path = tmp_path / "elsewhere"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


@pytest.mark.usefixtures("elsewhere")
def test_paths_in_the_file_are_relative_to_the_file(load, tmp_path):
    (tmp_path / "model").mkdir()
    text = (
        'model = { name = "model" }\n'
        + RL.replace("rewards.py", "../rewards.py")
        + 'filters = ["mean", "f.py:keep", "pkg.mod:keep"]\nresponse_template = "read.json"\n'
    )
    config = load(text)
    assert config.rl.data[0].path == str(tmp_path / "train.jsonl")
    assert config.rl.rollout.reward == f"{tmp_path.parent / 'rewards.py'}:score"
    assert config.rl.rollout.filters == ["mean", f"{tmp_path / 'f.py'}:keep", "pkg.mod:keep"]
    assert config.rl.rollout.response_template == str(tmp_path / "read.json")
    assert config.model.name == str(tmp_path / "model")


@cases("""
name                          | path
bundled:smollm2-135m-instruct |
tiny:byte                     |
org/model                     |
org:x.gguf                    |
models/x.gguf                 | models/x.gguf
./gone                        | gone
saved                         | saved
""")
def test_a_name_is_a_path_if_it_says_so_or_is_there(load, tmp_path, name, path):
    (tmp_path / "saved").mkdir()
    expected = str(tmp_path / path) if path else name
    assert load(f'model = {{ name = "{name}" }}').model.name == expected
    for kind, found in (("hf", expected), ("reasoning_gym", name)):
        source = f'"{kind}", size = 3, dataset = "{name}"'
        config = load(RL.replace('"jsonl", path = "train.jsonl"', source))
        assert config.rl.data[0].dataset == found


def test_paths_in_flags_are_relative_to_the_working_directory(load, elsewhere):
    config = load(RL, "--rl.data.path", "here.jsonl", "--rl.rollout.reward", "r.py:f")
    assert config.rl.data[0].path == str(elsewhere / "here.jsonl")
    assert config.rl.rollout.reward == f"{elsewhere / 'r.py'}:f"


# --- out and back -------------------------------------------------------------------------------------------


MORE = """
filters = ["a.py:f"]
[rl.loss_params]
x = 3
y = 0.1
z = true
[rl.optim]
max_grad_norm = "none"
lr = 3e-7
[eval.data]
kind = "reasoning_gym"
dataset = "chain_sum"
size = 3
params = { min_terms = 2, deep = { a = [1] } }
"""


def test_a_dumped_config_loads_back_equal(load, tmp_path):
    config = load('name = "ü \\" x"\n' + SFT + RL + MORE)
    saved = tmp_path / "runs" / "config.toml"
    saved.parent.mkdir()
    saved.write_text(dump_config(config))
    assert load_config(saved) == config


FREE = "--rl.steps 9 --output.keep_checkpoints 2 --name other --model.device cpu --distributed.ranks 2"
FASTER = "--engine.max_rows 4 --model.threads 1 --rl.micro_batch_tokens 99"


@cases(f"""
text                 | flags                         | same | …
                     | {FREE} | yes
                     | --seed 0 --sft.optim.lr 1e-4 --rl.normalise_by tokens | yes | the defaults
                     | {FASTER} | yes
deterministic = true | {FREE} | yes
deterministic = true | {FASTER} | no
                     | --seed 1                      | no
                     | --rl.optim.max_grad_norm none | no
                     | --rl.kl_coef 0.5              | no
                     | --rl.data.size 3              | no
                     | --rl.loss_params.x 3          | no
                     | --rl.data.path other.jsonl    | no
                     | --rl.changes.loss ppo_clip    | no
""")
def test_a_resumed_run_may_change_what_it_writes_but_not_what_it_computes(load, text, flags, same: bool):
    text += SFT + RL + "[[rl.changes]]\nfrom_step = 2\nclip_low = 0.3\n"
    saved, now = (load(text, *words) for words in ([], flags.split()))
    assert (training_digest(saved) == training_digest(now)) is same
    if same:
        check_same_run(saved, now)
    else:
        with pytest.raises(RunDirError, match=f"{flags.split()[0][2:]}: .* then, .* now"):
            check_same_run(saved, now)


def test_the_training_digest_knows_files_by_name_and_not_by_place(load, tmp_path):
    here, there = (load(RL, "--model.chat_template", f"{tmp_path}/{name}") for name in ("a/x", "b/x"))
    assert training_digest(here) == training_digest(there) != training_digest(load(RL))


# --- what the pages say -------------------------------------------------------------------------------------


def blocks_of(page, language):
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@cases("block", blocks_of("data.md", "toml"))
def test_every_example_of_docs_data_md_loads(load, block):
    rest = 'steps = 1\n[rl.rollout]\nreward = "r.py:f"\n'
    source = '[rl.data]\nkind = "jsonl"\npath = "x.jsonl"\n'
    if block.startswith("columns"):
        block = source + block
    text = f"{block}{rest}{source}" if block.startswith("[rl]\n") else f"[rl]\n{rest}{block}"
    assert load(text).rl.data


def test_the_python_examples_of_docs_data_md_run(tmp_path):
    for name, text in zip(("rows", "shift", "own"), blocks_of("data.md", "python"), strict=True):
        (tmp_path / f"{name}.py").write_text(text)
    row = next(load_function("rows.py:make_rows", role="rows", base_dir=tmp_path)(size=2, seed=1, digits=2))
    first, second = re.findall(r"\d+", row["prompt"])
    assert row == {"prompt": f"{first} + {second} = ?", "answer": str(int(first) + int(second))}
    statistics = {"easy": SourceStatistics(last_batch_reward=0.95), "hard": SourceStatistics()}
    shift, own = (
        load_function(f"{name}.py:curriculum", role="curriculum", base_dir=tmp_path)
        for name in ("shift", "own")
    )
    assert shift(10, statistics) == pytest.approx({"easy": 0.9, "hard": 0.1})
    assert shift(60, statistics) == pytest.approx({"easy": 0.2, "hard": 0.8})
    assert own(10, statistics) == {"easy": 0.1, "hard": 1.0}
