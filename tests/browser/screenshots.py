"""Writes the pictures of docs/inspect.md and docs/command.md.

    python -m tests.browser.screenshots RUN [TROUBLED_RUN [COMPARED_RUN]] [--into docs/images]

RUN is shown in whole, TROUBLED_RUN (default: RUN) for its failures and samples, COMPARED_RUN beside
TROUBLED_RUN. A troubled run is made by

    python integration_training/train.py --config tests/browser/failing.toml --mode sft+rl --output.dir
    runs/failing
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import trio

from rollouts.inspect.report.page import write_report
from tests.browser.chromium import Page, open_page
from tests.browser.terminal import write_terminal_page

# charts are drawn when they come into view
SETTLE = "new Promise((done) => requestAnimationFrame(() => setTimeout(done, 300)))"


async def show(
    page: Page, report: Path, *, scheme: str, width: int, height: int, scripts: tuple[str, ...] = ()
) -> None:
    """Opens a report in a window of this size, and does in it what the scripts say."""
    await page.resize(width, height)
    await page.prefer(scheme)
    await page.open(report.as_uri())
    for script in scripts:
        await page.evaluate(script)
    await page.evaluate(SETTLE)


def at(section: str) -> str:
    """Scrolls to a section."""
    return (
        "document.documentElement.style.scrollBehavior = 'auto';"
        f" document.getElementById('{section}').scrollIntoView()"
    )


BY_ADVANTAGE = "document.querySelector('input[name=colouring][value=advantage]')?.click()"
LONGEST = (
    "(() => { const node = document.querySelector('#samples"
    " option[value=\"response_length-\"]').closest('select'); node.value = 'response_length-';"
    " node.dispatchEvent(new Event('change')); })()"
)


def list_commands(run: Path, troubled: Path) -> dict[str, tuple[list[str], int, int]]:
    """Words, columns of the terminal and last lines that are shown, by name of the picture."""
    return {
        "inspect": (["inspect", str(run)], 120, 62),
        "inspect-failures": (["inspect", str(troubled)], 120, 62),
        "samples": (
            ["samples", str(run), "--stage", "rl", "--step", "20", "--limit", "5", "--color", "advantage"],
            110,
            40,
        ),
        "samples-failed": (["samples", str(troubled), "--status", "failed", "--limit", "2"], 110, 40),
        "tail": (["tail", str(run), "--once"], 120, 40),
        "plot": (["plot", str(run), "reward/mean", "entropy/mean", "--stage", "rl"], 110, 30),
    }


async def take_all(run: Path, troubled: Path, compared: Path | None, into: Path, folder: Path) -> None:
    whole, failing = folder / "whole.html", folder / "failing.html"
    write_report([run], whole)
    write_report([troubled], failing)
    shots = {
        "report-light": (whole, partial(show, scheme="light", width=1280, height=1180)),
        "report-dark": (whole, partial(show, scheme="dark", width=1280, height=1180)),
        "report-narrow": (whole, partial(show, scheme="light", width=360, height=1100)),
        "report-time": (whole, partial(show, scheme="light", width=1280, height=1100, scripts=(at("time"),))),
        "report-failures": (
            failing,
            partial(show, scheme="light", width=1280, height=620, scripts=(at("failures"),)),
        ),
        "report-samples": (
            failing,
            partial(
                show, scheme="dark", width=1280, height=900, scripts=(at("samples"), LONGEST, BY_ADVANTAGE)
            ),
        ),
    }
    if compared is not None:
        both = folder / "both.html"
        write_report([troubled, compared], both)
        shots["report-comparison"] = (
            both,
            partial(show, scheme="light", width=1280, height=1200, scripts=(at("curves"),)),
        )
    for name, (words, columns, last) in list_commands(run, troubled).items():
        path = folder / f"{name}.html"
        height = 18 * write_terminal_page(words, path, columns=columns, last=last) + 32
        shots[f"terminal-{name}"] = (
            path,
            partial(show, scheme="light", width=int(9.5 * columns) + 32, height=height),
        )
    async with open_page(folder / "profile") as page:
        for name, (report, view) in shots.items():
            await view(page, report)
            await page.screenshot(into / f"{name}.png")
            print(into / f"{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("troubled", type=Path, nargs="?", metavar="TROUBLED_RUN")
    parser.add_argument("compared", type=Path, nargs="?", metavar="COMPARED_RUN")
    parser.add_argument("--into", type=Path, default=Path("docs/images"), metavar="DIR")
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        trio.run(
            take_all,
            arguments.run,
            arguments.troubled or arguments.run,
            arguments.compared,
            arguments.into,
            Path(folder),
        )


if __name__ == "__main__":
    main()
