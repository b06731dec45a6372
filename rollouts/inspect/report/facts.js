// What the page says of a run, from the rows that the report holds of it.
const PHASES = 6; // of which each has a colour; the rest of the step has the seventh
const REST = "rest of the step";
const PARTS = 20; // of the run's steps, over which failures are counted
const ACCURACY = /^eval\/(.+)\/((?:avg|maj|pass)@\d+|accuracy)$/;
const UPDATE = new RegExp([
  String.raw`(?<time>\S+)\s+attempt\s+(?<attempt>\d+)\s+(?<stage>\S+)\s+step\s+(?<step>\d+)\s+update\s+(?<update>\d+)`,
  String.raw`\s+version\s+(?<version>\d+)\s+loss\s+(?<loss>\S+)\s+kl\s+(?<KL>\S+)\s+beta\s+(?<β>\S+)`,
  String.raw`\s+grad_norm\s+(?<gradient_norm>\S+)\s+(?<clipped>\S+)\s+lr\s+(?<learning_rate>\S+)\s+samples\s+(?<samples>\d+)`,
  String.raw`\s+zero_advantage\s+(?<of_these_zero_advantage>\d+)\s+tokens\s+(?<tokens>\d+)(\s+(?<note>skipped: .*))?`,
].join(""));
const UPDATE_NAMES = [...UPDATE.source.matchAll(/\?<([^>]+)>/g)].map((match) => match[1]);

// The lists of a stage's metrics that have a value somewhere.
const listsOf = (rows, stage) => {
  const { stage: _, ...lists } = rows.find((row) => row.stage === stage) ?? {};
  return Object.fromEntries(Object.entries(lists).filter(([, values]) => values.some((value) => value !== null)));
};
const total = (run, name, stage) => run.totals.filter((row) => row.name === name && (!stage || row.stage === stage)).reduce((sum, row) => sum + row.total, 0);
const meanOf = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const minute = (unix) => `${new Date(unix * 1000).toISOString().replace("T", " ").slice(0, 16)} UTC`;
const titled = (text) => text.slice(0, 1).toUpperCase() + text.slice(1);

function curvesOf(run, { stage, rows }) {
  const axis = run.axes.find((row) => row.stage === stage);
  const [means, lows, highs] = [run.means, run.lows, run.highs].map((table) => listsOf(table, stage));
  const grouped = rows > axis.step.length; // else a point is one step
  const metric = (name) => ({ mean: means[name], low: grouped ? lows[name] : null, high: grouped ? highs[name] : null });
  return { rows, step: axis.step, time: axis.time, resumed: axis.resumed, metrics: Object.fromEntries(Object.keys(means).map((name) => [name, metric(name)])) };
}

// Seconds of each phase a step, the longest first and the rest of the step last; null where there is none.
function phasesOf(run, { stage, rows }) {
  const lists = listsOf(run.phases, stage);
  const totals = Object.fromEntries(Object.keys(lists).map((name) => [name.slice(5), total(run, name, stage)]));
  const phases = Object.keys(totals).filter((name) => totals[name] > 0 && !["step", "weight_sync_pause"].includes(name));
  const names = phases.sort((a, b) => totals[b] - totals[a]).slice(0, PHASES);
  if (!names.length) return null;
  const seconds = Object.fromEntries(names.map((name) => [name, lists[`time/${name}`].map((value) => value ?? 0)]));
  const rest = (totals.step ?? 0) - names.reduce((sum, name) => sum + totals[name], 0);
  if (rest > 0) {
    seconds[REST] = lists["time/step"].map((value, at) => Math.max(0, (value ?? 0) - names.reduce((sum, name) => sum + seconds[name][at], 0)));
    totals[REST] = rest;
    names.push(REST);
  }
  return { names, seconds, total: totals, rows, ahead: rest < -0.02 * (totals.step ?? 0) };
}

// `name stat` of each accuracy that was evaluated, with its values in the order of the run.
function accuraciesOf(run) {
  const found = new Map();
  for (const row of run.evaluations) {
    for (const [name, value] of Object.entries(row.metrics)) {
      const match = ACCURACY.exec(name);
      if (match) found.set(`${match[1]} ${match[2]}`, [...(found.get(`${match[1]} ${match[2]}`) ?? []), value]);
    }
  }
  return found;
}

// The numbers that people look for first, those that the run has.
function tilesOf(run) {
  const tiles = [];
  const add = (name, value, note) => tiles.push({ name, value, note });
  for (const [name, values] of [...accuraciesOf(run)].slice(0, 1)) add(titled(name), percent(values.at(-1)), `at first ${percent(values[0])}`);
  const main = run.stages.some(({ name }) => name === "rl") ? "rl" : run.stages.at(-1)?.name;
  const metrics = run.curves[main]?.metrics ?? {};
  const titles = { "reward/mean": "Reward", "rewards/accuracies": "Pairs ranked right", "loss/total": "Loss", "truncated/frac": "Cut at the limit" };
  for (const [name, title] of Object.entries(titles)) {
    const values = metrics[name]?.mean.filter((value) => value !== null); // means of the first and of the last tenth
    if (values) add(`${title}, ${main}`, number(meanOf(values.slice(-Math.max(1, Math.floor(values.length / 10))))), `at first ${number(meanOf(values.slice(0, Math.max(1, Math.floor(values.length / 10)))))}`);
  }
  const steps = run.stages.reduce((sum, stage) => sum + stage.last, 0);
  add("Steps", count(steps), run.stages.map((stage) => `${stage.name} ${count(stage.last)}`).join(", "));
  add("Time in steps", duration(total(run, "time/step")), steps ? `${duration(total(run, "time/step") / steps)} a step` : "");
  add("Samples failed", count(run.failed.reduce((sum, kind) => sum + kind.total, 0)), run.failed.slice(0, 3).map((kind) => `${kind.name} ${count(kind.total)}`).join(", "));
  const lag = run.totals.find((row) => row.stage === main && row.name === "off_policy/max");
  const mean = metrics["off_policy/mean"]?.mean.filter((value) => value !== null);
  if (lag) add("Greatest staleness", count(lag.high), `versions${mean ? `; mean ${number(meanOf(mean))}` : ""}`);
  return tiles;
}

// What the run is: names and texts, those that are known.
function factsOf(run) {
  const { summary, times: [{ begun, newest } = {}] } = run;
  const accuracy = Object.entries(summary.accuracy ?? {}).filter(([, value]) => value !== null);
  const seen = run.certain || newest === undefined ? "" : `; last row ${minute(newest)}`;
  return Object.entries({
    directory: run.directory,
    state: `${run.activity}${seen}, ${plural(run.attempts, "attempt", "attempts")}`,
    begun: begun === undefined ? "" : minute(begun),
    "time in steps": duration(total(run, "time/step")),
    stages: summary.mode ?? run.stages.map(({ name }) => name).join(" → "),
    accuracy: accuracy.map(([name, value]) => `${name} ${percent(value)}`).join(" → "),
    device: summary.device ?? "",
    seed: String(summary.seed ?? ""),
    "greatest memory": "peak_rss_gib" in summary ? `${summary.peak_rss_gib} GiB` : "",
    checkpoints: run.checkpoints.map(([stage, step]) => `${stage}/step_${step}`).join(", "),
    versions: Object.entries(summary.versions ?? {}).map(([name, of]) => `${name} ${of}`).join(", "),
  }).filter(([, text]) => text);
}

// The lines of updates.log in columns, those that a line has a value in; lines of words are events and stand elsewhere.
function updatesOf({ lines: read, total: all, torn }, events) {
  const lines = read.filter((line) => !/^\S+ {2}\S+ step \d+: /.test(line));
  const found = lines.map((line) => UPDATE.exec(line.trimEnd())).filter((match, at) => match && match[0] === lines[at].trimEnd()).map((match) => match.groups);
  const names = UPDATE_NAMES.filter((name) => found.some((row) => (row[name] ?? "-") !== "-"));
  const unread = lines.length - found.length;
  return { columns: names.map((name) => name.replaceAll("_", " ")), lines: found.map((row) => names.map((name) => row[name] ?? "")), total: all - unread - Math.max(events.length, read.length - lines.length), unread: unread + torn };
}

function describeRun(run, index) {
  run.samples = { total: run.logged[0].total, shown: sampleRows[index].length };
  run.evaluations = run.evaluations.map(({ stage, step, policy_version: version = null, name = "", ...row }) => (
    { stage, step, version, name, metrics: Object.fromEntries(Object.entries(row).filter(([key]) => key.includes("/"))) }));
  run.curves = Object.fromEntries(run.stages.map((stage) => [stage.stage, curvesOf(run, stage)]));
  run.phases = Object.fromEntries(run.stages.map((stage) => [stage.stage, phasesOf(run, stage)]).filter(([, phases]) => phases));
  run.stages = run.stages.map(({ stage, last }) => ({ name: stage, last }));
  const spreads = {};
  for (const { stage, name, ...spread } of run.spreads) (spreads[stage] ??= {})[name] = spread;
  run.spreads = spreads;
  for (const kind of run.failed) kind.spread = Array.from({ length: PARTS }, (_, part) => kind.spread.find((found) => found.part === part)?.samples ?? 0);
  const dropped = run.dropped.map((row) => [row.reason, row[">groups"]]);
  run.failures = { classes: run.failed, messages: run.messages, more: (run.messages[0]?.kinds ?? 0) - run.messages.length, dropped, trouble: run.trouble };
  run.tiles = tilesOf(run);
  run.facts = factsOf(run);
  run.updates = updatesOf(run.updates, run.events);
}
runs.forEach(describeRun);
