"""The report in a real browser: it opens, its samples are filtered, steps change, keys work, and it says and
loads nothing else.
"""

from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
import trio

from rollouts.inspect.report.page import write_report
from tests.browser.chromium import COMPLAINTS, open_page
from tests.browser.written_run import head, write_run
from tests.support.text_tables import cases, read_cells
from tests.unit.run_rows import write_rows

pytestmark = [pytest.mark.browser]

SHOWN = "document.querySelectorAll('#sample-list li').length"
SELECTED = "document.querySelector('#sample-list [aria-selected=true]')?.id"
STEP = "document.getElementById('sample-step').value"
COUNT = "document.getElementById('sample-count').textContent"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(246, 247, 249)", "rgb(16, 20, 24)"
# an empty canvas of this size has about 3000
PICTURE_BYTES = "document.querySelector('{} canvas').toDataURL().length"


@asynccontextmanager
async def open_report(tmp_path, *runs):
    """The page of a report. On the way out: nothing was said on the console, nothing raised, nothing but the
    file was asked for.
    """
    path = tmp_path / "report.html"
    write_report(runs or (write_run(tmp_path / "written"),), path)
    async with open_page(tmp_path / "profile") as page:
        await page.prefer("light")
        await page.open(path.as_uri())
        yield page
        assert page.said(*COMPLAINTS) == []
        asked = {one["request"]["url"] for one in page.said("Network.requestWillBeSent")}
        assert asked <= {path.as_uri(), "data:,"}


@pytest.fixture
async def page(tmp_path):
    with trio.fail_after(120):
        async with open_report(tmp_path) as page:
            yield page


async def choose(page, label, value):
    """Chooses an entry of the select that stands in the label that begins with `label`."""
    await page.evaluate(
        "(() => { const node = [...document.querySelectorAll('#samples label')].find((other) =>"
        f" other.textContent.startsWith({label!r})); const field = node.querySelector('select'); field.value"
        f" = {value!r}; field.dispatchEvent(new Event('change')); }})()"
    )


async def fill_in(page, field, text):
    await page.evaluate(f"document.getElementById({field!r}).select()")
    await page.type(text)


async def set_value(page, selector, value):
    """Sets a field as if it had been typed."""
    node = f"document.querySelector({selector!r})"
    await page.evaluate(f"{node}.value = {value!r}; {node}.dispatchEvent(new Event('input'))")


async def test_it_opens_with_every_section_and_draws(page):
    titles = await page.evaluate(
        "[...document.querySelectorAll('main h2')].map((node) => node.textContent).join()"
    )
    assert titles == (
        "Overview,Curves,Time by phase,Distributions,Failures,Samples,Evaluations,Weight updates,Settings"
    )
    assert await page.evaluate("document.title") == "written"
    await page.wait(f"{PICTURE_BYTES.format('#curves')} > 6000")
    await page.evaluate("document.getElementById('time').scrollIntoView()")
    await page.wait(f"{PICTURE_BYTES.format('#time')} > 6000")
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_it_tells_a_run_in_numbers(page):
    texts = await page.evaluate(
        "[...document.querySelectorAll('.tile')].map((node) => node.innerText.replaceAll('\\n', ' '))"
    )
    assert texts[0] == "Heldout avg@1 40 % at first 2 %"
    assert "Reward, rl 0.195 at first 0.015" in texts
    assert "Time in steps 43 s 1.7 s a step" in texts
    phases = await page.evaluate("document.querySelector('#time tbody').innerText")
    said = ["generate\t25 s\t62.5 %", "train\t10 s\t25 %", "rest of the step\t5 s\t12.5 %"]
    assert ["\t".join(line.split("\t")[:3]) for line in phases.split("\n") if line] == said
    assert "finished, 1 attempt" in await page.evaluate("document.querySelector('#overview dl').innerText")


async def test_lines_of_the_audit_log_are_columns_and_one_that_cannot_be_read_spoils_no_other(tmp_path):
    run = write_run(tmp_path / "written")
    log = run / "updates.log"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:3], lines[3][:40] + lines[4], "\0\0\n", *lines[5:], lines[0][:-9]]))
    async with open_report(tmp_path, run) as page:
        said = await page.evaluate("document.querySelector('#updates p').textContent")
        assert "3 more lines are torn or of another form" in said
        heads = await page.evaluate("document.querySelector('#updates thead').innerText")
        assert heads.split("\t")[3:9] == ["step", "update", "version", "loss", "gradient norm", "clipped"]
        rows = await page.evaluate("document.querySelector('#updates tbody').innerText")
        assert len(rows.strip().split("\n")) == 18
        assert "skipped: the loss is not finite" in rows


async def test_samples_are_filtered_by_status_reward_and_text(page):
    assert await page.evaluate(SHOWN) == 80
    await choose(page, "Status", "failed")
    assert await page.evaluate(SHOWN) == 4
    assert "no answer after 5 s" in await page.evaluate(
        "document.querySelector('.message.failure').textContent"
    )
    await choose(page, "Status", "all")
    await fill_in(page, "sample-filter", "IT IS 21.")  # 18 + 3, 19 + 2, 20 + 1; the case does not count
    assert await page.evaluate(SHOWN) == 3
    assert await page.evaluate("document.querySelector('#sample mark').textContent") == "It is 21."
    await set_value(page, "#sample-filter", "")
    await set_value(page, '[aria-label="Least reward"]', "0.5")
    # rewards 0.5 and 0.75 of twenty steps, less the four that failed and have none
    assert await page.evaluate(SHOWN) == 36
    assert (await page.evaluate(COUNT)).startswith("36 samples found. The report holds all of the 80")


async def test_samples_are_sorted_and_shown_with_their_texts_as_text(page):
    await choose(page, "Sort", "response_length-")
    assert "7 tok" in await page.evaluate("document.querySelector('#sample-list li').textContent")
    shown = await page.evaluate("document.getElementById('sample').textContent")
    assert "</script><script>document.title = 'broken'</script>" in shown
    assert "<b>word word word </b>" in shown
    assert await page.evaluate("document.querySelectorAll('#sample b').length") == 1  # the reward's own
    assert await page.evaluate("document.title") == "written"


# what is pressed, what is looked at, what it is then; letters in a field are letters
KEYS = """
ArrowDown ArrowDown ArrowUp | selected | sample-1
ArrowUp  | selected | sample-0
j j k    | selected | sample-1
] ]      | step | 2
         | shown | 4
[        | step | 1
/        | document.activeElement.id | sample-filter
j        | document.activeElement.value | j
Escape   | document.activeElement === document.body | true
c /      | document.activeElement.id | metric-filter
Escape ? | document.getElementById('keys').open | true
Escape   | document.getElementById('keys').open | false
"""
WATCHED = {"selected": SELECTED, "shown": SHOWN, "step": STEP}


async def test_keys_change_sample_and_step_and_lead_to_the_search(page):
    await page.evaluate("document.getElementById('sample-list').focus()")
    for keys, expression, expected in read_cells(KEYS):
        for key in keys.split():
            await page.press(key)
        assert await page.evaluate(f"String({WATCHED.get(expression, expression)})") == expected, keys


async def test_everything_that_takes_a_click_is_reached_by_tab_and_has_a_name(page):
    nameless = await page.evaluate(
        "[...document.querySelectorAll('button, select, input, canvas[tabindex], a[href]')].filter((node)"
        " => node.tabIndex < 0 || ![node.getAttribute('aria-label'), node.textContent,"
        " node.closest('label')?.textContent].some((text) => text?.trim())).map((node) => node.outerHTML)"
    )
    assert nameless == []
    found = set()
    for _ in range(60):
        await page.press("Tab")
        found.add(await page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"theme", "help", "metric-filter", "CANVAS", "SUMMARY"} <= found
    levels = await page.evaluate(
        "[...document.querySelectorAll('h1, h2, h3, h4')].map((node) => Number(node.tagName[1]))"
    )
    assert levels[0] == 1
    # no level is left out on the way down
    assert max(after - before for before, after in pairwise(levels)) == 1


async def test_the_theme_follows_the_system_until_it_is_chosen(page):
    assert await page.evaluate(BACKGROUND) == LIGHT
    await page.prefer("dark")
    assert await page.evaluate(BACKGROUND) == DARK
    await page.press("t")
    assert await page.evaluate(BACKGROUND) == LIGHT
    await page.evaluate("document.getElementById('theme').click()")
    await page.prefer("light")
    assert await page.evaluate(BACKGROUND) == DARK


CONTRAST = """(() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const backdrop = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = channels(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const hasText = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  const skipped = ['SCRIPT', 'STYLE', 'OPTION'];
  const texts = [...document.querySelectorAll('body *')].filter(
    (node) => node.checkVisibility() && hasText(node) && !skipped.includes(node.tagName));
  const rated = texts.filter((node) => !node.disabled).map((node) => {
    const [a, b] = [light(channels(getComputedStyle(node).color)), light(backdrop(node))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.outerHTML.slice(0, 120)];
  });
  return rated.filter(([ratio]) => ratio < 4.5);
})()"""  # WCAG 2's ratio of luminances


@cases("scheme: light dark")
async def test_text_is_readable_on_what_is_behind_it(page, scheme):
    await page.prefer(scheme)
    await choose(page, "Status", "failed")
    assert await page.evaluate(CONTRAST) == []


@cases("width: 360 768 2000")
async def test_nothing_is_wider_than_the_window(page, width: int):
    await page.resize(width, 800)
    assert await page.evaluate("document.documentElement.scrollWidth") <= width


async def test_metrics_are_filtered_and_drawn_over_time_and_on_a_log_axis(page):
    await fill_in(page, "metric-filter", "reward")
    titles = await page.evaluate(
        "[...document.querySelectorAll('#curves figcaption span:first-child')].map((node) =>"
        " node.textContent)"
    )
    assert titles == ["reward/mean", "fail/reward"]
    for field in ("value=time", "type=checkbox"):
        await page.evaluate(f"document.querySelector('#curves input[{field}]').click()")
    await page.evaluate("document.querySelector('#curves canvas').focus()")
    await page.press("ArrowRight")
    await page.press("ArrowRight")
    tip = await page.evaluate("document.getElementById('tip').textContent")
    assert tip == "0.1667 min\n0.02"  # 10 s after the first row


SAID = """2027-01-15T08:00:01Z  rl step 1: publication 1: the average of 1 steps, accuracy 0.500
2027-01-15T08:00:02Z  rl step 2: refused: the average of 2 steps; accuracy 0.100
"""


async def test_a_guarded_curve_has_its_band_and_what_happened_and_leads_to_what_mattered(tmp_path):
    run = write_run(tmp_path / "written", steps=2)
    config = run / "config.toml"
    config.write_text(config.read_text().replace("[rl.optim]", "kl_ref_limit = 0.1\n[rl.optim]"))
    rows = [head("rl", step) | {"kl/ref_after": step / 10, "optim/undone": step - 1.0} for step in (1, 2)]
    write_rows(run / "metrics.jsonl", *rows)
    write_rows(run / "contributions.jsonl", head("rl", 2) | {"update": 0, "id": "s2-1", "share": 0.75})
    with (run / "updates.log").open("a") as log:
        log.write(SAID)
    async with open_report(tmp_path, run) as page:
        assert await page.evaluate("document.querySelector('#guardrails caption').textContent") == (
            "Guardrails, 100.0 % of 2 updates succeeded, 1 published, 1 refused"
        )
        guard = await page.evaluate("document.querySelector('#guardrails tbody').innerText")
        assert guard.split("\t")[:4] == ["kl/ref_after", "≤ 0.1", "50.0 %", "1 undone"]
        assert await page.evaluate("document.querySelector('#guardrails .last').textContent") == "0.2 · ≤ 0.1"
        await page.evaluate("document.querySelector('#guardrails canvas').focus()")
        await page.press("ArrowRight")
        await page.press("ArrowRight")
        tip = await page.evaluate("document.getElementById('tip').textContent")
        assert tip == "step 2\n0.2\nrefused: the average of 2 steps; accuracy 0.100"
        # lines of words are not lines of updates that could not be read
        assert "of another form" not in await page.evaluate(
            "document.querySelector('#updates p').textContent"
        )
        await page.evaluate("document.querySelector('#guardrails button').click()")
        assert "s2-1" in await page.evaluate("document.querySelector('#sample h3').textContent")


async def test_a_failure_leads_to_a_sample(page):
    await page.evaluate("document.querySelector('#failures button').click()")
    assert await page.evaluate(STEP) == "5"
    assert "s5-3" in await page.evaluate("document.querySelector('#sample h3').textContent")


async def test_two_runs_are_shown_beside_each_other(tmp_path):
    runs = write_run(tmp_path / "slow"), write_run(tmp_path / "fast", steps=30, lr=5e-3)
    async with open_report(tmp_path, *runs) as page:
        differing = "document.querySelector('#differences tbody').innerText.includes('rl.optim.lr')"
        assert await page.evaluate(differing)
        await page.evaluate("document.querySelector('#curves canvas').focus()")
        await page.press("ArrowRight")
        tip = await page.evaluate("document.getElementById('tip').textContent")
        assert tip == "step 1\nslow: 0.01\nfast: 0.01"
        await choose(page, "Run", "1")
        assert (await page.evaluate(COUNT)).startswith("120 samples found")


async def test_it_prints_light_and_without_its_controls(page):
    await page.prefer("dark")
    pdf = await page.call("Page.printToPDF", printBackground=True)
    assert len(pdf["data"]) > 50_000
    await page.call("Emulation.setEmulatedMedia", media="print")
    assert await page.evaluate(
        "[...document.querySelectorAll('.controls')].every((node) => !node.checkVisibility())"
    )
