"""docs/benchmarks.md, from results and from notes that people wrote."""

import ast
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.h200.targets import TARGETS

FOLDER = Path(__file__).resolve().parent
Results = Mapping[str, Mapping[str, Any]]  # name of a benchmark → its result
HEAD = """# Benchmarks

`make bench` runs the CPU set into this page; `make bench BENCH="packing e2e_reward"` runs some of it, and the
others keep their results. `make bench-h200` runs the suite for a GPU; `python -m benchmarks.bench --add FILE`
takes its output into this page. The page is written by `benchmarks/bench.py` from the newest
`benchmarks/results/bench-DATE.json` and from `benchmarks/notes.md`; `python -m benchmarks.bench --render`
writes it again.

Ours and the peer take turns A B B A, and a ratio is the median of such pairs of turns; where a benchmark does
otherwise, its docstring says so. Where both can be asked for the same numbers, these are compared before
anything is timed. Ceilings of the machine are measured in the same run. *Load* is the machine's load average
of the last minute when a benchmark ended.

*Measured* names the day and the commit of the code that a result is of; it says nothing about later commits,
which `git log COMMIT..` lists.
"""


def write_page(
    path: Path, results: Results, *, cpu_set: Sequence[str], others: Sequence[str], notes: Path
) -> None:
    """Writes the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = notes.read_text(encoding="utf-8") if notes.exists() else ""
    path.write_text(
        format_page(results, cpu_set=cpu_set, others=others, notes=parse_notes(text)), encoding="utf-8"
    )


def parse_notes(text: str) -> dict[str, str]:
    """What is below each `## name`, without what comes before the first."""
    sections = ("\n" + text).split("\n## ")[1:]
    return {name.strip(): body.strip() for name, _, body in (section.partition("\n") for section in sections)}


def format_page(
    results: Results, *, cpu_set: Sequence[str], others: Sequence[str], notes: Mapping[str, str]
) -> str:
    """The whole page: all targets, then a section for each benchmark of the set, the GPU's, and each other
    one that has a result.
    """
    shown = [*cpu_set, *(name for name in others if name in results or name == "h200")]
    lines = [
        HEAD,
        "## Targets\n",
        "| benchmark | metric | value | target | met | measured | peer |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [line for name in shown if name in results for line in format_targets(name, results[name])]
    missing = [name for name in shown if name not in results]
    lines += ["", f"Not run yet: {', '.join(missing)}."] if missing else []
    for name in shown:
        lines += ["", *format_section(name, results.get(name), notes.get(name, ""))]
    return "\n".join(lines) + "\n"


def format_targets(name: str, result: Mapping[str, Any]) -> list[str]:
    """A line of the table for each target."""
    lines: list[str] = []
    day, commit = result["date"].partition(" ")[0], result.get("commit") or ""
    for metric, target in result["targets"].items():
        met = result["met"].get(metric)
        said = {True: "yes", False: "**no**", None: "not measured"}[met]
        lines.append(
            f"| [{name}](#{name}) | {metric} | {format_value(result['metrics'].get(metric))} | {target} |"
            f" {said} | {day} {commit} | {result['peer']} |"
        )
    return lines


def format_section(name: str, result: Mapping[str, Any] | None, note: str) -> list[str]:
    """What it measures, its command, when and where it ran, all metrics, what was not measured, and the
    note.
    """
    about, command = read_about(name)
    lines = [
        f"## {name}",
        "",
        about,
        "",
        "```sh",
        command if result is None else shlex.join(result["command"]),
        "```",
        "",
    ]
    if result is None:
        targets = [
            "",
            "| metric | target |",
            "|---|---|",
            *(f"| {metric} | {target} |" for metric, target in TARGETS.items()),
        ]
        lines += ["Not run yet.", *(targets if name == "h200" else [])]
    else:
        lines += [format_circumstances(result)]
        missing = [metric for metric, value in result["metrics"].items() if value is None]
        reasons: Mapping[str, str] = result.get("unmeasured", {})
        if name != "h200_tiny":  # whose numbers mean nothing
            lines += [
                "",
                "| metric | value |",
                "|---|---|",
                *(
                    f"| {metric} | {format_value(value)} |"
                    for metric, value in result["metrics"].items()
                    if value is not None
                ),
            ]
        lines += [""] if missing else []
        for why in dict.fromkeys(reasons.get(metric, "") for metric in missing):
            names = ", ".join(metric for metric in missing if reasons.get(metric, "") == why)
            lines.append(f"- not measured{f' ({why})' if why else ''}: {names}")
        lines += (
            ["", *(f"**{part} failed**: {why}" for part, why in result["failures"].items())]
            if result.get("failures")
            else []
        )
    return [*lines, "", note] if note else lines


def format_circumstances(result: Mapping[str, Any]) -> str:
    """When, how long, on what, with which versions, of which commit."""
    machine: Mapping[str, Any] = result.get("machine") or {}
    where = [str(machine["gpu"])] if "gpu" in machine else []
    where += [f"{machine['cores']} cores of {machine['cpu']}"] if {"cores", "cpu"} <= set(machine) else []
    where += [f"{machine['memory_gib']} GiB"] if "memory_gib" in machine else []
    where += [f"load {machine['load']:g}"] if "load" in machine else []
    took = "" if result.get("wall_s") is None else f", {result['wall_s']:.0f} s"
    versions = ", ".join(f"{package} {number}" for package, number in (result.get("versions") or {}).items())
    commit = f"commit {result['commit']}" if result.get("commit") else ""
    return "; ".join(part for part in (f"{result['date']}{took}", ", ".join(where), versions, commit) if part)


def format_value(value: object) -> str:
    """Four significant digits of a number; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")


def read_about(name: str) -> tuple[str, str]:
    """The first paragraph of the docstring of a benchmark and the command in it, without importing it. ("",
    command) where there is no file.
    """
    module = "h200" if name == "h200_tiny" else name
    path = next(
        (path for path in (FOLDER / f"{module}.py", FOLDER / module / "__main__.py") if path.exists()), None
    )
    command = f"python -m benchmarks.{module}" + (" --tiny" if name == "h200_tiny" else "")
    if path is None:
        return "", command
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()), command
