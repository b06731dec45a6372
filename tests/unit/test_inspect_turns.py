"""How a trajectory of many turns is shown: its messages, what became of its calls, rewards, segments."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollouts.cli import main
from rollouts.inspect.turns import list_turns
from rollouts.metrics.writer import open_jsonl_logger
from rollouts.run_dir import RunDir
from rollouts.types import Sample, Status
from tests.support.made_updates import make_update
from tests.support.text_tables import cases
from tests.unit.run_rows import read_command

HOSTILE = "\x1b[2J</script>"
CONVERSATION: dict[str, Any] = json.loads("""{
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
HEAD = "── rl step 4 · a.1 · group 4 · completed · reward -0.500 · 3 tokens · 3 versions behind\n"
SPLIT = "— segment 2 begins: what came before was written anew —\n"
ENDED = "ended: done · turns 3 · tool calls 2 · 10.5 of 12.0 s waiting · resumed 1\n"
TURNS = f"""{HEAD}[user] Twice 12 * 34?
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


async def write_samples(root: Path, *samples: Sample) -> str:
    """Logs two trajectories of these at most, and an update of the first two samples."""
    update = UPDATE._replace(batch=replace(UPDATE.batch, samples=samples[:2]))
    async with open_jsonl_logger(
        RunDir(root), attempt=1, samples_per_step=2, token_arrays_bytes=1 << 20, in_thread=False
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
    marked = f"{HEAD}5 {{+++ 6 7 }}\n{SPLIT}5 {{+++ 8 }}\ntokens that train:\n{ENDED}\n{OTHER}"
    assert read_command(capsys, "samples", root, "--color", "mask", "--limit", "2").startswith(marked)


@cases("""
turns                               | said
[]                                  | [assistant]
[{"tokens": 0}, {"tokens": 7}]      | [assistant · turn 2 · 7 tokens]
[{"tokens": 7, "rewards": {"a": 2}}]| [assistant · turn 1 · 7 tokens · a 2]
""")
def test_turns_are_the_last_messages_of_the_model(turns: Any, said):
    """A prompt may hold others, and an agent may have rewritten its history."""
    shown = list_turns({"messages": [{"role": "assistant", "content": "hi"}], "trajectory": {"turns": turns}})
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
