"""Writes the pictures of docs/inspect.md and docs/command.md.

    python -m tests.browser.screenshots RUN [TROUBLED_RUN [COMPARED_RUN]] [--into docs/images]

RUN is shown in whole, TROUBLED_RUN (default: RUN) for its failures and samples, COMPARED_RUN beside
TROUBLED_RUN. A troubled run is made by

    python integration_training/train.py --config tests/browser/failing.toml --mode sft+rl --output.dir
    runs/failing
"""

import argparse
import tempfile
from pathlib import Path

import trio

from rollouts.inspect.report.page import write_report
from tests.browser.chromium import open_page
from tests.browser.terminal import write_terminal_page

# charts are drawn when they come into view
SETTLE = "new Promise((done) => requestAnimationFrame(() => setTimeout(done, 300)))"
SCROLL = """document.documentElement.style.scrollBehavior = 'auto';
    document.getElementById('{}').scrollIntoView()"""
LONGEST = """(() => {
    const node = document.querySelector('#samples option[value="response_length-"]').closest('select');
    node.value = 'response_length-'; node.dispatchEvent(new Event('change')); })();
    document.querySelector('input[name=colouring][value=advantage]')?.click()"""
# the picture, the runs in the report, theme, width and height of the window, the section that is scrolled to
REPORTS = """
    report-light       RUN                light  1280  1180  -
    report-dark        RUN                dark   1280  1180  -
    report-narrow      RUN                light  360   1100  -
    report-time        RUN                light  1280  1100  time
    report-failures    TROUBLED           light  1280  620   failures
    report-samples     TROUBLED           dark   1280  900   samples
    report-comparison  TROUBLED,COMPARED  light  1280  1200  curves"""
# the picture, columns of the terminal and last lines that are shown, the command
COMMANDS = """
    terminal-inspect           120  62  inspect RUN
    terminal-inspect-failures  120  62  inspect TROUBLED
    terminal-samples           110  40  samples RUN --stage rl --step 20 --limit 5 --color advantage
    terminal-samples-failed    110  40  samples TROUBLED --status failed --limit 2
    terminal-tail              120  40  tail RUN --once
    terminal-plot              110  30  plot RUN reward/mean entropy/mean --stage rl"""


async def take_all(runs, into, folder):
    shots = []
    for line in REPORTS.strip().splitlines():
        name, shown, scheme, width, height, section = line.split()
        if set(shown.split(",")) <= runs.keys():
            write_report([runs[key] for key in shown.split(",")], folder / f"{name}.html")
            shots.append((name, scheme, int(width), int(height), section))
    for line in COMMANDS.strip().splitlines():
        name, columns, last, *words = line.split()
        words = [str(runs.get(word, word)) for word in words]
        lines = write_terminal_page(words, folder / f"{name}.html", columns=int(columns), last=int(last))
        shots.append((name, "light", int(9.5 * int(columns)) + 32, 18 * lines + 32, "-"))
    async with open_page(folder / "profile") as page:
        for name, scheme, width, height, section in shots:
            await page.resize(width, height)
            await page.prefer(scheme)
            await page.open((folder / f"{name}.html").as_uri())
            if section != "-":
                await page.evaluate(SCROLL.format(section))
            if section == "samples":
                await page.evaluate(LONGEST)
            await page.evaluate(SETTLE)
            await page.screenshot(into / f"{name}.png")
            print(into / f"{name}.png")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN [TROUBLED_RUN [COMPARED_RUN]]")
    parser.add_argument("--into", type=Path, default=Path("docs/images"), metavar="DIR")
    arguments = parser.parse_args()
    run, troubled, *others = arguments.runs if len(arguments.runs) > 1 else arguments.runs * 2
    runs = dict(zip(("RUN", "TROUBLED", "COMPARED"), (run, troubled, *others), strict=False))
    arguments.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        trio.run(take_all, runs, arguments.into, Path(folder))


if __name__ == "__main__":
    main()
