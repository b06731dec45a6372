"""Which samples `samples` finds, and how it prints them; how a trajectory of many turns is shown."""

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models

from rollouts.cli import main, make_parser
from rollouts.errors import RunDirError
from rollouts.inspect.record import open_record
from rollouts.inspect.samples import find_samples, list_turns, print_samples, split_text
from rollouts.metrics.writer import open_jsonl_logger
from rollouts.run_dir import RunDir
from rollouts.types import Status
from tests.support.made_updates import make_update
from tests.support.text_tables import cases, read_params
from tests.unit.chat_tokenizers import turn
from tests.unit.run_rows import HEAD, read_command, write_block, write_rows


def make_sample(step, number, **fields):
    known = {"id": f"s{number}", "group_index": number // 2, "status": "completed", "prompt": "add"}
    known |= {"step": step, "policy_version": step - 1, "response": f"it is {number}", "reward": number / 10}
    return known | {"tokens": 9, "response_length": 20 - number} | fields


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Seven samples of three steps and one of an evaluation; a second attempt wrote step 2 again."""
    root = tmp_path_factory.mktemp("run")
    rows = [make_sample(1 + number // 2, number, weight_version_min=number // 4) for number in range(7)]
    rows.append(make_sample(4, 7, stage="eval-rl", prompt=[turn("user", "Sum")]))
    write_rows(root / "samples.jsonl", *rows[:3], make_sample(2, 3, status="failed", reward=None))
    again = [make_sample(2, number, attempt=2) for number in (8, 3)]
    write_rows(root / "samples.1.jsonl", *rows[4:], *again)
    (root / "config.toml").touch()
    return root


ASKED = vars(make_parser("samples").parse_args(["samples", "RUN"]))  # by a command without options


def find_ids(root, **query):
    with open_record(root) as record:
        places = find_samples(record, ASKED | query)["places"]
        return " ".join(row["id"] for row in record.read_samples(places))


@cases("""
query                              | expected
                                   | s0 s1 s4 s5 s6 s7 s8 s3
limit = 3                          | s7 s8 s3
limit = 3, reverse = true          | s3 s8 s7
step = 2                           | s8 s3
stage = "eval-rl"                  | s7
last = true, group = 2             | s4 s5
sort = "reward", limit = 2         | s0 s1
sort = "length", limit = 2         | s8 s7
sort = "lag", reverse = true, limit = 2 | s6 s4
status = "failed"                  |
grep = "IT IS 4"                   | s4
grep = "sum"                       | s7
grep = "user"                      |
grep = "completed"                 |
""")
def test_samples_are_chosen_and_ordered(run, query: dict, expected):
    assert find_ids(run, **query) == expected


def test_a_step_or_stage_without_samples_says_what_there_is(run):
    for query, message in (({"step": 9}, "--step 9: .*steps 1 to 4"), ({"stage": "sft"}, "eval-rl, rl")):
        with pytest.raises(RunDirError, match=message):
            find_ids(run, **query)
    assert main(["samples", str(run), "--limit", "0"]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["samples", str(run), "--sort", "rewrd"])


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(st.sampled_from('aAéÉ"\\\n\t<日{}[]'), max_size=4), min_size=1, max_size=5),
    needle=st.text(st.sampled_from('aé"\\\n\t<日{}[]'), min_size=1, max_size=2),
    ascii_only=st.booleans(),
)
def test_the_search_finds_what_looking_at_every_row_finds(texts, needle, ascii_only, tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    (root / "config.toml").touch()
    rows = [
        {**HEAD, "id": str(place)} | ({"response": text} if place % 2 else {"prompt": [turn("user", text)]})
        for place, text in enumerate(texts)
    ]
    lines = [json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows]
    (root / "samples.jsonl").write_text("".join(lines))
    expected = [str(place) for place, text in enumerate(texts) if needle.lower() in text.lower()]
    assert find_ids(root, grep=needle).split() == expected


TRANSCRIPT = """── rl step 9 · s9 · group 4 · completed · reward 0.900 · 11 tokens · 1 version behind
[prompt] add
→ it is 9
rewards: a 1, b 0.5

1 of 2 logged samples
"""


def test_a_transcript_has_a_headline_turns_and_the_parts_of_the_reward(tmp_path, capsys):
    (tmp_path / "config.toml").touch()
    parts = {"a": 1, "b": 0.5}
    sample = make_sample(9, 9, weight_version_min=7, rewards=parts)
    write_rows(tmp_path / "samples.jsonl", make_sample(1, 0), sample)
    assert read_command(capsys, "samples", tmp_path, "--step", "9") == TRANSCRIPT
    row = read_command(capsys, "samples", tmp_path, "--json", "--limit", "1", "--reverse")
    assert json.loads(row)["rewards"] == parts


# --- tokens -------------------------------------------------------------------------------------------------


def test_pieces_make_up_the_text_and_a_character_of_two_tokens_is_one_piece():
    tokenizer = Tokenizer(models.BPE({"a": 0, "Ã": 1, "©": 2, "b": 3}, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert split_text([0, 1, 2, 3], tokenizer) == ["a", "", "é", "b"]


def test_tokens_are_marked_by_arrays_and_tokenizer(tmp_path, capsys):
    write_rows(tmp_path / "samples.jsonl", make_sample(1, 0), make_sample(1, 1))
    arrays = """tokens = [0, 1, 2], mask = [0, 1, 1], advantage = [0.0, 0.5, -0.25], \
log_prob = [0.5, -1.0, -1.0], mu = [0.0, -1.5, -1.0001]"""
    place = write_block(tmp_path, "s0", **read_params(arrays))
    write_rows(tmp_path / "contributions.jsonl", {"id": "s0", "update": 0, "row": 0, **place})
    words = models.WordLevel({"<s>": 0, "two": 1, "plus": 2}, unk_token="<s>")
    Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    config = f'[model]\nname = "{tmp_path}"\n'
    no_update = "not marked, 1 sample: no update of the weights had this sample"
    for settings_text, column, *parts in (
        (config, "advantage", "<s>{+++  two}{--  plus}\nadvantage of the token: {--- to -0.5}", no_update),
        (config, "advantage", "→ it is 1"),  # what is not marked is printed plain
        (config, "logprob_diff", "<s>{+++  two} plus\n"),  # 0.0001 is rounding; what does not train is 0
        ("", "mask", "0 {+++ 1 2 }\n", "tokens are shown by number: there is no tokenizer.json yet"),
    ):
        (tmp_path / "config.toml").write_text(settings_text)
        printed = read_command(capsys, "samples", tmp_path, "--color", column)
        assert all(part in printed for part in parts), printed
    (tmp_path / "config.toml").write_text(config)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=200)
    with open_record(tmp_path) as record:
        print_samples(console, record, find_samples(record, ASKED), color="advantage")
    assert "\x1b[37;48;2;160;82;15m two" in out.getvalue()  # white on the darkest orange


# --- trajectories of many turns -----------------------------------------------------------------------------


HOSTILE = "\x1b[2J</script>"
CONVERSATION = json.loads("""{
"messages": [
    {"role": "user", "content": "Twice 12 * 34?"},
    {"role": "assistant", "content": "", "reasoning_content": "A product.", "tool_calls": [
        {"type": "function", "id": "c1", "function": {"name": "multiply", "arguments": {"a": 12, "b": 34}}},
        {"type": "function", "id": "c2", "function": {"name": "wait", "arguments": {"for": "é"}}}]},
    {"role": "tool", "content": "408", "tool_call_id": "c1", "name": "multiply"},
    {"role": "tool", "content": "Error: no answer in 10 s", "tool_call_id": "c2", "name": "wait"},
    {"role": "assistant", "content": "408"},
    {"role": "user", "content": "And twice that?"},
    {"role": "assistant", "content": "816"}],
"trajectory": {"end": "done", "trains": true, "tool_calls": 2, "time/tools": 10.5,
    "time/all": 12.0, "restarts": 0,
    "resumed": 1, "turns": [
        {"tokens": 1, "calls": [{"name": "multiply", "outcome": "ok", "time/call": 0.5},
                                {"name": "wait", "outcome": "timeout", "time/call": 10.0}]},
        {"tokens": 1, "reward": 0.5, "rewards": {"product": 0.5}},
        {"tokens": 2, "segment": 1, "reward": -1.0}]}}""")
# segments a and a.1, of 2 and 1 tokens that train, from versions 0 to 2, trained from 3; and b, of one turn
HEADLINE = "── rl step 4 · a.1 · group 4 · completed · reward -0.500 · 3 tokens · 3 versions behind\n"
SPLIT = "— segment 2 begins: what came before was written anew —\n"
ENDED = "ended: done · turns 3 · tool calls 2 · 10.5 of 12.0 s waiting · resumed 1\n"
TURNS = f"""{HEADLINE}[user] Twice 12 * 34?
[assistant · turn 1 · 1 token] (thinks) A product.
calls multiply {{"a":12,"b":34}}
calls wait {{"for":"é"}}
[tool · multiply] 408
[tool · wait · timeout] Error: no answer in 10 s
[assistant · turn 2 · 1 token · reward 0.5 · product 0.5] 408
[user] And twice that?
{SPLIT}[assistant · turn 3 · 2 tokens · reward -1] 816
{ENDED}"""
OTHER = (
    "── rl step 4 · b · group 4 · completed · reward 1.000 · 1 token · 2 versions behind\n[prompt] p\n→ 4\n"
)
STALENESS = "staleness of 1 logged samples, 100.0 % with tokens of more than one version"
METRICS = {"tools/multiply/ok": 3.0, "tools/multiply/timeout": 1.0, "trajectories/ended/done": 2.0}
UPDATE = make_update()
A, B = (replace(one, group_index=4, status=Status.COMPLETED) for one in UPDATE.batch.samples)
FIRST = replace(A, weight_versions=[-1, 0, 2], reward=-0.5)
LAST = replace(B, id="a.1", weight_versions=[-1, 2], reward=-0.5, metadata=CONVERSATION)
SAMPLES = (FIRST, LAST, replace(B, weight_versions=[-1, 1], response="4", reward=1.0))


async def write_samples(root, *samples):
    """Logs two trajectories of these at most, and an update of the first two samples."""
    update = UPDATE._replace(batch=replace(UPDATE.batch, samples=samples[:2]))
    async with open_jsonl_logger(
        RunDir(root), attempt=1, samples_per_step=2, token_arrays_bytes=1 << 20
    ) as logger:
        await logger.log_samples("rl", 4, 3, samples)
        await logger.log_step("rl", 4, 3, METRICS, updates=[update])
    (root / "config.toml").touch()
    return str(root)


@cases("""
options                            | expected
                                   | TURNS OTHER 2 of 2 logged samples
--sort length --limit 1            | OTHER 1 of 2 that match, of 2 logged samples; --limit shows more
--sort lag --limit 1 --reverse     | TURNS 1 of 2 that match, of 2 logged samples; --limit shows more
--grep é"                          | TURNS 1 of 2 logged samples
--grep PRODUCT.                    | TURNS 1 of 2 logged samples
--grep tool_call_id                | 0 of 2 logged samples
""")
async def test_a_trajectory_is_one_sample_with_its_turns(tmp_path, capsys, options, expected):
    root = await write_samples(tmp_path, *SAMPLES)
    for name, text in (("TURNS ", f"{TURNS}\n"), ("OTHER ", f"{OTHER}\n")):
        expected = expected.replace(name, text)
    assert read_command(capsys, "samples", root, *options.split()) == f"{expected}\n"


async def test_the_row_of_a_trajectory_counts_all_segments(tmp_path, capsys):
    root = await write_samples(tmp_path, *SAMPLES)
    row = json.loads(read_command(capsys, "samples", root, "--json", "--grep", "816"))
    counted = ("id", "tokens", "response_length", "weight_version_min", "weight_version_max")
    assert [row[name] for name in counted] == ["a.1", 5, 3, 0, 2]
    assert row["trajectory"] == CONVERSATION["trajectory"]


async def test_tokens_are_marked_segment_by_segment(tmp_path, capsys):
    root = await write_samples(tmp_path, *SAMPLES)
    marked = f"{HEADLINE}5 {{+++ 6 7 }}\n{SPLIT}5 {{+++ 8 }}\ntokens that train:\n{ENDED}\n{OTHER}"
    assert read_command(capsys, "samples", root, "--color", "mask", "--limit", "2").startswith(marked)


@cases("""
turns                               | said
[]                                  | [assistant]
[{"tokens": 0}, {"tokens": 7}]      | [assistant · turn 2 · 7 tokens]
[{"tokens": 7, "rewards": {"a": 2}}]| [assistant · turn 1 · 7 tokens · a 2]
""")
def test_turns_are_the_last_messages_of_the_model(turns: Any, said):
    """A prompt may hold others, and an agent may have rewritten its history."""
    shown = list_turns({"messages": [turn("assistant", "hi")], "trajectory": {"turns": turns}})
    assert shown == [{"said": f"{said} ", "text": "hi"}]


async def test_what_a_model_writes_steers_neither_terminal_nor_page(tmp_path, capsys):
    hostile = json.loads(json.dumps(CONVERSATION).replace("multiply", json.dumps(HOSTILE)[1:-1]))
    root = await write_samples(tmp_path, FIRST, replace(LAST, metadata=hostile))
    assert main(["samples", root]) == main(["inspect", root]) == main(["report", root]) == 0
    printed = capsys.readouterr().out
    assert r"[tool · \x1b[2J</script>] 408" in printed
    assert "\x1b" not in printed
    for part in ("│ multiply │     4 │  3 │       1 │", "ended: done       2  100.0 %", STALENESS):
        assert part in printed
    page = (tmp_path / "report.html").read_text()
    assert page.count("</script>") == 3
    (samples,) = json.loads(page.split('id="sample-data">')[1].split("</script>")[0])
    shown = list_turns(hostile)
    assert [(one["turns"], one["share"], one["arrays"]["mask"]) for one in samples] == [
        (shown, 1.0, [0, 1, 1, 0, 1])
    ]
