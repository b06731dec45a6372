"""The config: TOML and flags in, frozen settings or one message with every problem out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollouts.config.aliases import ALIASES
from rollouts.config.explain import (
    describe_unknown_key,
    explain_config,
    explain_key,
    explain_markdown,
    suggest_keys,
)
from rollouts.config.keys import config_keys
from rollouts.config.lines import find_lines
from rollouts.config.load import (
    check_same_run,
    config_digest,
    dump_config,
    load_config,
    load_with_origins,
    training_digest,
)
from rollouts.config.plugins import load_function
from rollouts.config.schema import RunConfig
from rollouts.data.curriculum import SourceStatistics
from rollouts.errors import ConfigError, RunDirError

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
def write(tmp_path: Path):
    def write_config(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_config


def problems_of(path: Path, overrides: list[str] | None = None) -> list[str]:
    """The lines of the message, without the file's name and line in front."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides or [])
    lines = str(caught.value).splitlines()
    lines = lines[1:] if len(lines) > 1 else lines
    return [re.sub(rf"^{re.escape(str(path))}(:\d+)?: ", "", line.strip()) for line in lines]


# --- values -------------------------------------------------------------------------------------------------


def test_an_empty_file_is_the_defaults(write):
    assert load_config(write("")) == RunConfig()


def test_values_of_the_file_replace_defaults(write):
    config = load_config(write("seed = 7\n[model]\nthreads = 2\n" + RL))
    assert (config.seed, config.model.threads, config.model.autocast) == (7, 2, "auto")
    assert config.rl is not None
    assert config.rl.steps == 4
    assert config.rl.rollout.samples_per_prompt == 8


def test_a_whole_number_is_a_number_but_text_is_not(write):
    config = load_config(write(RL.replace("steps = 4", "steps = 4\nclip_low = 1")))
    assert config.rl is not None
    assert config.rl.clip_low == 1.0
    assert problems_of(write(SFT.replace("3", '"8"'))) == [
        'sft.steps = "8"; it must be a whole number, at least 1; write it without quotes: 8'
    ]


def test_an_sft_optimizer_table_that_leaves_lr_out_keeps_the_sft_default(write):
    config = load_config(write(SFT + "[sft.optim]\nwarmup_steps = 2\n"))
    assert config.sft is not None
    assert (config.sft.optim.lr, config.sft.optim.warmup_steps) == (1e-4, 2)
    config = load_config(write(SFT + "[sft.optim]\nlr = 0.5\n"))
    assert config.sft is not None
    assert config.sft.optim.lr == 0.5


def test_the_word_none_switches_off_a_nullable_number(write):
    config = load_config(write(RL + '[rl.optim]\nmax_grad_norm = "none"\n'))
    assert config.rl is not None
    assert config.rl.optim.max_grad_norm is None
    assert load_config(write(RL), ["--rl.optim.max_grad_norm", "none"]) == config


def test_the_word_none_stays_text_where_text_is_asked_for(write):
    assert load_config(write('name = "none"')).name == "none"


# --- flags --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [["--rl.rollout.num_prompts", "4"], ["--rl.rollout.num_prompts=4"]])
def test_a_flag_overrides_a_nested_setting(write, flags):
    config = load_config(write(RL), flags)
    assert config.rl is not None
    assert config.rl.rollout.num_prompts == 4


def test_flags_are_read_as_their_setting_asks(write):
    config = load_config(
        write(RL),
        [
            "--name", "8",
            "--deterministic", "true",
            "--seed", "3",
            "--rl.optim.lr", "1e-6",
            "--rl.clip_high=1",
            "--rl.rollout.filters", '["a", "b"]',
            "--rl.loss_params.x", "3",
            "--rl.loss_params.mode", "hard",
            "--rl.data.params.deep.list", "[1, 2]",
            "--rl.data.system_prompt", '"quoted = yes"',
            "--model.autocast", "off",
        ],
    )  # fmt: skip
    assert (config.name, config.deterministic, config.seed, config.model.autocast) == ("8", True, 3, "off")
    assert config.rl is not None
    assert (config.rl.optim.lr, config.rl.clip_high, config.rl.rollout.filters) == (1e-6, 1.0, ["a", "b"])
    assert config.rl.loss_params == {"x": 3, "mode": "hard"}
    assert config.rl.data[0].params == {"deep": {"list": [1, 2]}}
    assert config.rl.data[0].system_prompt == "quoted = yes"


def test_the_last_of_two_equal_flags_counts(write):
    assert load_config(write(""), ["--seed", "1", "--seed", "2"]).seed == 2


def test_a_flag_cannot_smuggle_in_a_second_setting(write):
    assert problems_of(write(""), ["--seed", "1\nname = 'x'"]) == [
        "--seed: seed = \"1\\nname = 'x'\"; it must be a whole number, at least 0, below 9223372036854775808"
    ]


def test_a_flag_into_an_absent_table_says_what_the_table_needs(write):
    assert problems_of(write(RL), ["--eval.temperature", "0.5"]) == [
        (
            "--eval.temperature: the file has no [eval] table to change; add one with eval.data, or leave the"
            " flag out"
        )
    ]


def test_a_wrong_flag_is_named_with_its_value_and_rule(write):
    assert problems_of(write(RL), ["--rl.rollout.num_prompts", "many", "--rl.loss_params.x", "[3]"]) == [
        '--rl.rollout.num_prompts: rl.rollout.num_prompts = "many"; it must be a whole number, at least 1',
        "--rl.loss_params.x: rl.loss_params.x = [3]; it must be a number, true or false, or text",
    ]


def test_malformed_flags_are_named(write):
    assert problems_of(
        write(RL),
        [
            "--seed",
            "--name",
            "x",
            "stray",
            "--rl.optim",
            "3",
            "--rl.loss_params",
            "3",
            "--sed",
            "1",
            "--name",
        ],
    ) == [
        "--seed: has no value; write --seed VALUE",
        "stray: a stray word; settings are given as --section.key value",
        "--rl.optim: rl.optim is a table; set one of its keys, for example --rl.optim.lr VALUE",
        (
            "--rl.loss_params: rl.loss_params is a table; set one of its keys, for example"
            " --rl.loss_params.NAME VALUE"
        ),
        "--sed: " + describe_unknown_key("sed"),
        "--name: has no value; write --name VALUE",
    ]


def test_flags_that_name_no_setting_or_no_table_are_told_so(write):
    assert problems_of(
        write(RL),
        [
            "--=3",
            "--rl..steps",
            "3",
            "--rl.data.5.path",
            "x",
            "--rl.rollout.filters",
            "check",
            "--rl.data.0.pth",
            "x",
        ],
    ) == [
        "--: names no setting; settings are given as --section.key value",
        "--rl..steps: names no setting; settings are given as --section.key value",
        "--rl.data.5.path: rl.data has 1 table in the file, numbered from 0; write --rl.data.0.path",
        "--rl.data.0.pth: " + describe_unknown_key("rl.data.pth"),
        '--rl.rollout.filters: rl.rollout.filters = "check"; it must be a list of text; write ["check"]',
    ]
    assert "did you mean path?" in describe_unknown_key("rl.data.0.pth")


def test_a_flag_below_a_value_of_the_file_leaves_the_problem_to_the_file(write):
    assert problems_of(write("model = 3"), ["--model.threads", "2"]) == ["model = 3; it must be a table"]


# --- what is wrong with a file ------------------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path):
    assert problems_of(tmp_path / "no.toml") == ["there is no such file; name a TOML file with --config FILE"]


def test_a_directory_is_no_config(tmp_path):
    assert problems_of(tmp_path) == ["cannot be read: Is a directory"]


def test_a_syntax_error_gives_its_line(write):
    assert problems_of(write("seed = 1\nname = = 2\n")) == ["not TOML: Invalid value (at line 2, column 8)"]


def test_a_file_that_is_not_utf8_gives_the_byte(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b'name = "\xff"')
    assert problems_of(path) == ["not UTF-8 at byte 8; a TOML file is UTF-8 text"]


def test_an_unknown_key_gives_the_nearest_and_the_valid_ones(write):
    (problem,) = problems_of(write(RL + "temperture = 1.0\n"))
    assert (
        problem
        == "unknown key rl.rollout.temperture; did you mean temperature? Valid here: temperature, generate,"
        " reward, filters, num_prompts, group_reward, reward_model, max_attempts and 9 more: python -m"
        " rollouts explain rl.rollout"
    )


def test_all_problems_of_a_file_are_listed_one_a_line(write):
    text = """
    deterministic = 1
    [model]
    autocast = "bflot16"
    [sft]
    steps = 0
    data = { kind = "jsonl" }
    [rl]
    kl_coef = inf
    data = { kind = "csv", path = "x" }
    rollout = { temperature = 0, filters = [3], max_failed_fraction = 2 }
    """
    assert problems_of(write(text)) == [
        "deterministic = 1; it must be true or false",
        'model.autocast = "bflot16"; it must be one of "off", "bfloat16", "auto"; did you mean "bfloat16"?',
        "sft.data: path is missing; a jsonl source names its file",
        "sft.steps = 0; it must be a whole number, at least 1",
        'rl.data.kind = "csv"; it must be one of "jsonl", "parquet", "hf", "reasoning_gym", "python"',
        "rl.steps is missing: training steps of the stage",
        "rl.rollout.temperature = 0; it must be a number, above 0",
        "rl.rollout.filters.0 = 3; it must be a list of text",
        "rl.rollout.max_failed_fraction = 2; it must be a number, at least 0, at most 1",
        "rl.kl_coef = inf; it must be a number, at least 0, and finite",
    ]


def test_rules_between_settings_name_both(write):
    (problem,) = problems_of(write(RL.replace("steps = 4", "steps = 4\nsync_every = 3")))
    assert problem.startswith("rl: max_staleness=0 is below sync_every - 1 = 2")
    (problem,) = problems_of(write('deterministic = true\n[model]\nautocast = "bfloat16"'))
    assert problem.startswith("model.autocast='bfloat16' with deterministic=true")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (
            RL.replace('"jsonl", path = "train.jsonl"', '"reasoning_gym", size = 3'),
            "rl.data: dataset is missing",
        ),
        (
            RL.replace('"jsonl", path = "train.jsonl"', '"reasoning_gym", dataset = "chain_sum"'),
            "rl.data: size is missing",
        ),
        (
            RL.replace("steps = 4", 'steps = 4\nkl_coef = 0.1\nkl_estimator = "k3"'),
            "rl: kl_estimator='k3' with kl_in='reward'",
        ),
        (
            RL.replace("steps = 4", 'steps = 4\nkl_coef = 0.1\nkl_in = "loss"'),
            "rl: kl_estimator='k1' with kl_in='loss'",
        ),
        (
            RL.replace("steps = 4", "steps = 4\nmax_staleness = 1"),
            "engine.mode='shared' with rl.sync_every=1, rl.max_staleness=1",
        ),
    ],
)
def test_a_combination_that_cannot_work_is_refused(write, text, rule):
    (problem,) = problems_of(write(text))
    assert problem.startswith(rule)


# --- suggestions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("rl.rollout.group_size", "samples_per_prompt"),
        ("rl.rollout.num_generations", "samples_per_prompt"),
        ("rl.rollout.num-prompts", "num_prompts"),
        ("rl.rollout.batch_size", "num_prompts (in RL it counts prompts, in SFT conversations)"),
        ("rl.optim.learning_rate", "lr"),
        ("rl.lr", "rl.optim.lr"),
        ("sft.lr", "sft.optim.lr"),
        ("rl.temperture", "rl.rollout.temperature"),
        ("rl.rolout.num_prompts", "rl.rollout.num_prompts"),
        ("eval.data.pth", "path"),
        ("stepps", "sft.steps, rl.steps or preference.steps"),
        ("rl.optim.temperature", "rl.rollout.temperature"),
        ("eval.rollout.temperature", "rl.rollout.temperature"),
    ],
)
def test_a_wrong_key_gets_the_right_one_suggested(wrong, right):
    assert f"; did you mean {right}? " in describe_unknown_key(wrong)


def test_a_key_like_no_other_gets_no_suggestion():
    assert (
        describe_unknown_key("eval.zzz")
        == "unknown key eval.zzz. Valid here: data, reward, temperature, max_new_tokens, samples_per_prompt"
    )


def test_every_alias_points_to_settings_that_exist():
    assert len(ALIASES) >= 80
    assert [key for alias in ALIASES.values() for key in alias.keys if key not in config_keys()] == []
    assert [name for name in ALIASES if name in config_keys()] == [], "a setting of ours is no foreign name"


@pytest.mark.parametrize("name", list(ALIASES))
def test_a_foreign_name_is_answered_with_our_key_however_it_is_written(name):
    wanted = set(ALIASES[name].keys)
    for form in (name, name.replace("_", "-"), name.upper()):
        suggested, _ = suggest_keys(form)
        assert wanted & set(suggested), (form, suggested)


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--actor_rollout_ref.rollout.n", "did you mean rl.rollout.samples_per_prompt?"),
        ("--rollout.n", "did you mean rl.rollout.samples_per_prompt?"),
        ("--data.train_batch_size", "did you mean rl.rollout.num_prompts?"),
        ("--algorithm.kl_ctrl.kl_coef", "did you mean rl.kl_coef?"),
        ("--num-generations", "did you mean rl.rollout.samples_per_prompt?"),
        ("--NUM_GENERATIONS", "did you mean rl.rollout.samples_per_prompt?"),
        ("--num-generatons", "did you mean rl.rollout.samples_per_prompt?"),
        (
            "--rl.train_batch_size",
            (
                "did you mean rl.rollout.num_prompts (there it counts samples, here prompts: divide it by"
                " samples_per_prompt)?"
            ),
        ),
        ("--rl.optim.epsilon", "did you mean eps?"),
        ("--trainer.save_freq", "did you mean output.checkpoint_every?"),
    ],
)
def test_a_foreign_flag_is_answered_with_our_key(write, flag, answer):
    (problem,) = problems_of(write(RL), [flag, "3"])
    assert answer in problem


def test_the_tables_of_another_framework_are_answered_setting_by_setting(write):
    (problem,) = problems_of(
        write(
            "[actor_rollout_ref]\nrollout = { n = 8, nonsense = 1 }\n[actor_rollout_ref.actor.optim]\nlr ="
            " 1e-6\n"
        )
    )
    assert "actor_rollout_ref.rollout.n is rl.rollout.samples_per_prompt here" in problem
    assert "actor_rollout_ref.actor.optim.lr is rl.optim.lr or sft.optim.lr here" in problem
    assert "nonsense" not in problem


# --- lines --------------------------------------------------------------------------------------------------


def test_every_setting_of_a_file_has_its_line():
    text = (
        'a = 1\n# note\nb.c = [\n  1,\n]\n[t]\nx = """\n[u]\ny = 2\n"""\nz = { p = 1 }\n[[r.d]]\nk ='
        " 1\n[[r.d]]\nk = 2\n[r.d.q]\nm = 1\n[[s]]\n"
    )
    text += "n = 3\n"
    assert find_lines(text) == {
        "a": 1, "b": 3, "b.c": 3, "t": 6, "t.x": 7, "t.z": 11, "t.z.p": 11, "r.d.0": 12, "r.d.0.k": 13,
        "r.d.1": 14, "r.d.1.k": 15, "r.d.1.q": 16, "r.d.1.q.m": 17, "s.0": 18, "s.0.n": 19, "s": 18,
        "s.n": 19,
    }  # fmt: skip


def test_a_problem_names_the_line_of_the_file(write):
    path = write(RL + "temperature = 0\n[rl.data_]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert f"  {path}:7: rl.rollout.temperature = 0; it must be" in str(caught.value)
    assert f"  {path}:8: unknown key rl.data_; did you mean data?" in str(caught.value)


def test_every_value_says_where_it_comes_from(write):
    path = write(RL + "[rl.loss_params]\nx = 3\n")
    _, values = load_with_origins(path, ["--rl.optim.lr", "0.5"])
    origins = {
        key: (values[key].text, values[key].origin)
        for key in ("rl.steps", "rl.data.kind", "rl.optim.lr", "seed", "rl.loss_params.x")
    }
    assert origins == {
        "rl.steps": ("4", f"{path}:3"),
        "rl.data.kind": ('"jsonl"', f"{path}:4"),
        "rl.optim.lr": ("0.5", "--rl.optim.lr"),
        "seed": ("0", "default"),
        "rl.loss_params.x": ("3", f"{path}:8"),
    }


# --- paths --------------------------------------------------------------------------------------------------


def test_paths_in_the_file_are_relative_to_the_file(write, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    text = (
        'model = { name = "model" }\n'
        + RL.replace("rewards.py", "../rewards.py")
        + 'filters = ["mean", "f.py:keep", "pkg.mod:keep"]\n'
    )
    config = load_config(write(text))
    assert config.rl is not None
    assert config.rl.data[0].path == str(tmp_path / "train.jsonl")
    assert config.rl.rollout.reward == f"{tmp_path.parent / 'rewards.py'}:score"
    assert config.rl.rollout.filters == ["mean", f"{tmp_path / 'f.py'}:keep", "pkg.mod:keep"]
    assert config.model.name == str(tmp_path / "model")


def test_a_dataset_directory_beside_the_config_is_a_path_and_a_hub_name_is_not(write, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "chain_sum").mkdir()
    hf, gym = '"hf", dataset = "saved"', '"reasoning_gym", size = 3, dataset = "chain_sum"'
    old = '"jsonl", path = "train.jsonl"'
    assert load_config(write(RL.replace(old, hf))).rl.data[0].dataset == str(tmp_path / "saved")
    assert (
        load_config(write(RL.replace(old, hf.replace("saved", "org/saved")))).rl.data[0].dataset
        == "org/saved"
    )
    assert load_config(write(RL.replace(old, gym))).rl.data[0].dataset == "chain_sum"


def test_paths_in_flags_are_relative_to_the_working_directory(write, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load_config(write(RL), ["--rl.data.path", "here.jsonl", "--rl.rollout.reward", "r.py:f"])
    assert config.rl is not None
    assert (config.rl.data[0].path, config.rl.rollout.reward) == (
        str(elsewhere / "here.jsonl"),
        f"{elsewhere / 'r.py'}:f",
    )


@pytest.mark.parametrize("name", ["bundled:smollm2-135m-instruct", "tiny:byte", "org/model"])
def test_a_model_name_that_is_no_directory_stays(write, name):
    assert load_config(write(f'model = {{ name = "{name}" }}')).model.name == name


def test_a_gguf_file_is_a_path(write, tmp_path):
    assert load_config(write('model = { name = "models/x.gguf" }')).model.name == str(
        tmp_path / "models" / "x.gguf"
    )
    assert load_config(write('model = { name = "org:x.gguf" }')).model.name == "org:x.gguf"
    (tmp_path / "org:x.gguf").write_text("", encoding="utf-8")
    assert load_config(write('model = { name = "org:x.gguf" }')).model.name == str(tmp_path / "org:x.gguf")


def test_a_model_name_that_says_it_is_a_path_becomes_absolute(write, tmp_path):
    assert load_config(write('model = { name = "./gone" }')).model.name == str(tmp_path / "gone")


# --- out and back -------------------------------------------------------------------------------------------


def test_a_dumped_config_loads_back_equal(write, tmp_path):
    extra = (
        'filters = ["a.py:f"]\n[rl.loss_params]\nx = 3\ny = 0.1\nz = true\n[rl.optim]\nmax_grad_norm ='
        ' "none"\nlr = 3e-7\n'
    )
    evaluation = (
        '[eval]\ndata = { kind = "reasoning_gym", dataset = "chain_sum", size = 3, params = { min_terms = 2,'
        " deep = { a = [1] } } }\n"
    )
    config = load_config(write('name = "ü \\" x"\n' + SFT + RL + extra + evaluation))
    saved = tmp_path / "runs" / "config.toml"
    saved.parent.mkdir()
    saved.write_text(dump_config(config), encoding="utf-8")
    assert load_config(saved) == config


def test_a_config_that_toml_cannot_hold_is_refused_by_name():
    config = RunConfig.model_validate(
        {"eval": {"data": {"kind": "reasoning_gym", "dataset": "x", "size": 1, "params": {"a": object()}}}}
    )
    with pytest.raises(ConfigError, match=r"data\.params"):
        dump_config(config)


def test_the_digest_depends_on_values_and_not_on_order(write):
    one = config_digest(load_config(write('seed = 1\nname = "x"')))
    assert one == config_digest(load_config(write('name = "x"\nseed = 1')))
    assert one != config_digest(load_config(write('name = "x"\nseed = 2')))
    assert len(one) == 64


def test_the_training_digest_changes_exactly_with_what_a_resumed_run_may_not_change(write):
    free = ["--rl.steps", "9", "--output.keep_checkpoints", "2", "--name", "other"]
    faster = ["--engine.max_rows", "4", "--model.threads", "1"]
    one, exact = load_config(write(RL)), load_config(write("deterministic = true\n" + RL))
    assert training_digest(one) == training_digest(load_config(write(RL), free + faster))
    assert training_digest(one) != training_digest(load_config(write(RL), ["--rl.optim.lr", "0.5"]))
    assert training_digest(exact) == training_digest(load_config(write("deterministic = true\n" + RL), free))
    assert training_digest(exact) != training_digest(
        load_config(write("deterministic = true\n" + RL), faster)
    )
    assert training_digest(exact) != training_digest(one)


def test_the_training_digest_leaves_out_what_has_its_default_so_that_a_new_setting_orphans_no_checkpoint(
    write,
):
    plain = load_config(write(SFT + RL))
    flags = [
        "--seed",
        "0",
        "--sft.optim.lr",
        str(plain.sft.optim.lr),
        "--rl.optim.lr",
        str(plain.rl.optim.lr),
    ]
    written_out = load_config(write(dump_config(plain)), flags)
    assert training_digest(plain) == training_digest(written_out)
    digests = [training_digest(plain)]
    for flag, value in (
        ("seed", "1"),
        ("sft.optim.lr", str(plain.rl.optim.lr)),
        ("rl.optim.max_grad_norm", "none"),
        ("rl.kl_coef", "0.5"),
    ):
        digests.append(training_digest(load_config(write(SFT + RL), [f"--{flag}", value])))
    digests += [
        training_digest(load_config(write(text)))
        for text in (SFT, RL, RL + '[eval]\ndata = { kind = "jsonl", path = "x.jsonl" }\n')
    ]
    digests.append(training_digest(load_config(write(RL + "[rl.loss_params]\nx = 3\n"))))
    assert len({*digests}) == len(digests)

    class NextRunConfig(RunConfig):
        new_setting: int = 3

    later = NextRunConfig(**{name: getattr(plain, name) for name in RunConfig.model_fields})
    assert training_digest(later) == training_digest(plain)
    assert training_digest(later.model_copy(update={"new_setting": 4})) != training_digest(plain)


def test_the_training_digest_tells_one_source_from_two(write):
    head = '[rl]\nsteps = 1\nrollout = { reward = "rewards.py:score" }\n'
    named = (("[rl.data]", "x"), ("[[rl.data]]", "x"), ("[[rl.data]]", "y"))
    table, one, two = (f'{opened}\nkind = "jsonl"\npath = "{name}.jsonl"\n' for opened, name in named)
    digests = [
        training_digest(load_config(write(head + text))) for text in (table, one, one + two, two + one)
    ]
    assert digests[0] == digests[1]
    assert len({*digests}) == 3


def test_the_training_digest_knows_files_by_name_and_not_by_place(write, tmp_path):
    here, there, other = (
        ["--model.chat_template", str(tmp_path / folder / name)]
        for folder, name in (("a", "x"), ("b", "x"), ("a", "y"))
    )
    digests = [training_digest(load_config(write(RL), flags)) for flags in (here, there, other)]
    assert digests[0] == digests[1] != digests[2]


def test_a_resumed_run_may_write_elsewhere_and_go_on_longer(write):
    saved = load_config(write(RL))
    check_same_run(
        saved,
        load_config(write(RL), ["--rl.steps", "9", "--output.checkpoint_every", "2", "--name", "other"]),
    )


@pytest.mark.parametrize("deterministic", ["", "deterministic = true\n"])
def test_a_resumed_run_may_go_on_on_another_device(write, deterministic):
    """In deterministic mode there is one only, however it is named."""
    saved, now = (
        load_config(write(deterministic + RL)),
        load_config(write(deterministic + RL), ["--model.device", "cpu"]),
    )
    check_same_run(saved, now)
    assert training_digest(saved) == training_digest(now)


def test_a_resumed_run_may_compute_faster_unless_it_promised_equal_bits(write):
    flags = ["--engine.max_rows", "4", "--model.threads", "1", "--rl.micro_batch_tokens", "99"]
    check_same_run(load_config(write(RL)), load_config(write(RL), flags))
    deterministic = "deterministic = true\n" + RL
    with pytest.raises(RunDirError, match=r"engine\.max_rows: 128 then, 4 now"):
        check_same_run(load_config(write(deterministic)), load_config(write(deterministic), flags))


def test_a_resumed_run_may_not_compute_something_else(write):
    saved = load_config(write(RL))
    with pytest.raises(RunDirError) as caught:
        check_same_run(saved, load_config(write(RL), ["--rl.optim.lr", "0.5", "--rl.data.size", "3"]))
    assert str(caught.value).splitlines()[1:] == [
        "  rl.optim.lr: 1e-05 then, 0.5 now",
        "  rl.data.size: unset then, 3 now",
    ]


# --- explaining ---------------------------------------------------------------------------------------------


def test_every_setting_says_what_it_means():
    assert [key.key for key in config_keys().values() if not key.meaning] == []


def test_the_explanation_has_a_line_per_setting_with_its_real_default():
    lines = explain_config().splitlines()
    for key in config_keys().values():
        begin = f"[[{key.key}]]  " if key.is_list else f"[{key.key}]  " if key.is_table else f"{key.key} "
        assert any(line.startswith(begin) for line in lines), key.key
    assert next(line for line in lines if line.startswith("sft.optim.lr ")).split()[1] == "0.0001"
    assert next(line for line in lines if line.startswith("rl.optim.lr ")).split()[1] == "1e-05"
    assert next(line for line in lines if line.startswith("rl.steps ")).split()[1] == "required"


def test_a_part_can_be_explained_alone():
    samples = (
        "output.samples_per_step  16     rows of samples.jsonl written per step and per evaluation, evenly"
        " spaced over what there is"
    )
    samples += "  (a whole number, at least 0)"
    best = (
        "output.keep_best         false  with keep_checkpoints: the one that did best on the held-out"
        " prompts stays too, of those that were"
    )
    best += " evaluated  (true or false)"
    lines = explain_config("output").splitlines()
    assert lines[:6] == [
        "[output]  Where the run writes.",
        'output.dir               ""     empty: runs/NAME  (text)',
        (
            "output.checkpoint_every  0      steps; 0: only at the end of a stage and when stopped  (a whole"
            " number, at least 0)"
        ),
        (
            "output.keep_checkpoints  0      newest complete checkpoints of a stage that stay; 0: all  (a"
            " whole number, at least 0)"
        ),
        best,
        samples,
    ]
    assert [line.split()[0] for line in lines[6:]] == [
        "output.token_arrays_gib",
        "output.trackers",
    ]
    assert "engine.admin_key_env" in explain_config("engine")
    with pytest.raises(KeyError, match="did you mean engine"):
        explain_config("engin")


def test_one_setting_is_explained_with_its_value_and_where_it_comes_from(write):
    path = write(RL + "samples_per_prompt = 4\n")
    _, values = load_with_origins(path)
    assert explain_key("rl.rollout.samples_per_prompt", values).splitlines()[:6] == [
        "rl.rollout.samples_per_prompt",
        "  meaning   G: samples of a group",
        "  type      a whole number, at least 1",
        "  default   8",
        f"  value     4  ({path}:7)",
        "  see also  rl.normalise_by, eval.samples_per_prompt",
    ]
    assert "group_size" in explain_key("rl.rollout.samples_per_prompt")
    with pytest.raises(KeyError, match="did you mean samples_per_prompt"):
        explain_key("rl.rollout.samples_per_promt")


def test_one_of_several_sources_is_explained_by_its_number(write):
    path = write(
        '[rl]\nsteps = 1\nrollout = {}\n[[rl.data]]\nkind = "jsonl"\npath = "a"\n[[rl.data]]\nkind ='
        ' "jsonl"\npath = "b"\nweight = 2.0\n'
    )
    _, values = load_with_origins(path)
    assert [line for line in explain_key("rl.data.weight", values).splitlines() if "value" in line] == [
        "  value     rl.data.0.weight = 1.0  (default)",
        f"  value     rl.data.1.weight = 2.0  ({path}:10)",
    ]
    assert f"rl.data.1.weight = 2.0  ({path}:10)" in explain_key("rl.data.1.weight", values)
    assert "rl.data.0.weight" not in explain_key("rl.data.1.weight", values)


def test_a_config_is_explained_value_by_value(write):
    path = write(SFT + "[sft.optim]\nlr = 0.5\n")
    lines = explain_config("", load_with_origins(path)[1]).splitlines()
    found = {line.split()[0]: line for line in lines if line}
    assert found["sft.optim.lr"].split()[1] == "0.5"
    assert found["sft.optim.lr"].endswith(f"(a number, above 0; {path}:6)")
    assert found["sft.data.size"].split()[1] == "unset"
    assert found["rl.steps"].endswith("; the file has no [rl])")


def test_the_page_of_settings_is_what_the_schema_says():
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == explain_markdown(), (
        "write it again: python -m rollouts explain --markdown > docs/config.md"
    )


# --- text that can be no path -------------------------------------------------------------------------------

LONG = "x" * 300


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("rl.data.path", f"{LONG}.jsonl"),
        ("model.chat_template", f"{LONG}.jinja"),
        ("model.name", f"./{LONG}"),
        ("model.name", LONG),
        ("model.name", f"{LONG}.gguf"),
        ("rl.rollout.reward", f"{LONG}.py:score"),
        ("rl.rollout.filters", f'["{LONG}.py:score"]'),
        ("output.dir", f"runs/{LONG}"),
        ("output.dir", "x/" * 2048),
        ("rl.data.path", "~nobody-of-this-name/x.jsonl"),
    ],
)
def test_a_path_that_cannot_be_one_is_refused_by_its_key(write, flag, value):
    (problem,) = problems_of(write(RL), [f"--{flag}", value])
    assert problem.startswith(f"--{flag}: {flag} = ")
    assert " cannot be a path: " in problem
    assert len(problem) < 300


def test_a_dataset_that_cannot_be_a_name_is_refused_by_its_key_and_number(write):
    one = '[[rl.data]]\nname = "{0}"\nkind = "hf"\ndataset = "{1}"\n'
    text = (
        "[rl]\nsteps = 1\n[rl.rollout]\nreward = 'r.py:f'\n"
        + one.format("a", "openai/gsm8k")
        + one.format("b", LONG)
    )
    (problem,) = problems_of(write(text))
    assert problem.startswith("rl.data.1.dataset = ")
    assert "cannot be a path: File name too long" in problem


@pytest.mark.parametrize(
    "key",
    [
        "name",
        "model.name",
        "model.chat_template",
        "output.dir",
        "rl.data.path",
        "rl.data.function",
        "rl.rollout.reward",
        "rl.loss_params.x",
    ],
)
def test_a_nul_character_is_refused_in_every_text_setting(write, key):
    found = problems_of(write(RL), [f"--{key}", '"a\\u0000b"'])
    assert found[0] == f"--{key}: {key} = 'a\\x00b': the text has a NUL character; remove it"


def test_a_nul_character_in_a_list_of_functions_is_refused(write):
    text = RL + 'filters = ["check_reward_nonzero_std", "a\\u0000.py:f"]\n'
    assert problems_of(write(text)) == [
        "rl.rollout.filters = 'a\\x00.py:f': the text has a NUL character; remove it"
    ]


def test_bytes_of_a_command_line_that_are_not_utf8_are_refused(write):
    assert problems_of(write(RL), ["--name", "caf\udce9"]) == [
        "--name: name = 'caf\\udce9': the text has bytes that are not UTF-8; remove them"
    ]


@pytest.mark.parametrize("path", ["a\0b.toml", f"{LONG}.toml"])
def test_a_config_file_whose_name_cannot_be_one_is_refused(path):
    with pytest.raises(ConfigError, match="cannot be"):
        load_config(path)


# --- what the pages say -------------------------------------------------------------------------------------


def blocks_of(page: str, language: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", blocks_of("data.md", "toml"))
def test_every_example_of_docs_data_md_loads(write, block):
    rl = "steps = 1\n"
    rest = '[rl.rollout]\nreward = "r.py:f"\n'
    source = '[rl.data]\nkind = "jsonl"\npath = "x.jsonl"\n'
    if block.startswith("columns"):
        text = f"[rl]\n{rl}{rest}{source}{block}"
    elif block.startswith("[rl]\n"):
        text = f"{block}{rl}{rest}{source}"
    else:
        text = f"[rl]\n{rl}{rest}{block}"
    config = load_config(write(text))
    assert config.rl is not None
    assert config.rl.data


def test_the_python_examples_of_docs_data_md_run(tmp_path):
    for name, text in zip(("rows", "shift", "own"), blocks_of("data.md", "python"), strict=True):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
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
