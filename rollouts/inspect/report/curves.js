// Lines over steps: the metrics, the phases of a step, evaluations.
const KEY_METRICS = [
  "reward/mean", "loss/total", "entropy/mean", "kl/ref", "response_length/mean", "truncated/frac", "trajectories/turns/mean", "optim/grad_norm", "off_policy/mean",
  "mismatch_kl/mean", "rewards/accuracies", "rewards/margins", "perf/generated_tokens_per_s", "time/step",
];
const AREAS = ["reward", "rewards", "advantage", "loss", "entropy", "kl", "response_length", "truncated", "trajectories", "tools", "groups", "fail", "off_policy"];
const view = { stage: mainStage(), axis: "step", log: false, smoothing: 0, filter: "", opened: new Map() };

// Exponential average, corrected for its start; absent values stay absent.
function smoothed(values, weight) {
  if (!weight) return values;
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// lines: {label, run, x, y, low, high, resumed: x of resumes, breaks: places where the line begins anew, names: of the points, guards: bands that its values should keep to, events: {x, text}}
function lineChart({ title, note, height = 190, lines, axis, log = false, smoothing = 0, marks = false }) {
  const shown = lines.map((line) => ({ ...line, smooth: smoothed(line.y, smoothing) }));
  const positive = (value) => value !== null && (!log || value > 0);
  const xs = extent(shown.map((line) => line.x)) ?? [0, 1];
  const ys = lineRange(shown, log);
  const last = shown.map((line) => line.y.findLast((value) => value !== null) ?? null);
  return addChart({
    title, height, note: note ?? [...last.filter((value) => value !== null).map(number).slice(0, 3), ...bandTexts(shown)].join(" · "),
    summary: ys ? `From ${number(ys[0])} to ${number(ys[1])}, last ${last.map(number).join(", ")}.${bandTexts(shown).map((text) => ` Guard: ${text}.`).join("")}` : "No values.",
    at(x, y, { box }) {
      if (!ys || x < box.left - 8) return null;
      return { x: xs[0] + ((Math.min(x, box.right) - box.left) / (box.right - box.left)) * (xs[1] - xs[0]) };
    },
    step(old, dx) {
      const line = shown.reduce((best, other) => (other.x.length > best.x.length ? other : best), shown[0]);
      const from = old ? nearest(line.x, old.x) : dx > 0 ? -1 : line.x.length;
      return dx ? { x: line.x[Math.max(0, Math.min(line.x.length - 1, from + dx))] } : old;
    },
    pixel: (place, { box }) => scales(box, xs, [0, 1], false).x(place.x),
    describe: ({ x }) => {
      const at = snap(shown, x);
      const named = shown.find((line) => line.names && pointAt(line, at) !== undefined);
      return [named ? named.names[pointAt(named, at)] : axisText(axis, at), ...shown.map((line) => `${shown.length > 1 ? `${line.label}: ` : ""}${pointText(line, pointAt(line, at), smoothing)}`), ...eventTexts(shown, at)].join("\n");
    },
    paint(context, chart) {
      const { box } = chart;
      if (!ys) return paintNothing(context, box, log ? "no values above 0 for a log axis" : "no values");
      const scale = scales(box, xs, ys, log);
      paintAxes(context, chart, xs, ys, scale, { log });
      context.save();
      context.beginPath();
      context.rect(box.left - 4, box.top - 4, box.right - box.left + 8, box.bottom - box.top + 8);
      context.clip();
      for (const line of shown) paintGuards(context, line, scale, ys, log, box);
      paintEvents(context, shown, scale, box);
      for (const line of shown) paintLine(context, line, scale, { log, smoothing, positive, marks, box });
      context.restore();
      if (chart.place) paintCursor(context, shown, chart, scale, positive);
    },
  });
}

function axisText(axis, x) {
  return axis === "time" ? `${number(x)} ${timeUnit(view.stage)[0]}` : `step ${count(x)}`;
}

// The x of a point that is nearest, of all lines.
function snap(lines, x) {
  const found = lines.filter((line) => line.x.length).map((line) => line.x[nearest(line.x, x)]);
  return found.reduce((best, other) => (Math.abs(other - x) < Math.abs(best - x) ? other : best), found[0] ?? x);
}

// The index of a line's point at x, undefined where the line has none near it.
function pointAt(line, x) {
  const index = nearest(line.x, x);
  const gap = line.x.length > 1 ? (line.x.at(-1) - line.x[0]) / (line.x.length - 1) : 1;
  return Math.abs(line.x[index] - x) <= gap ? index : undefined;
}

function pointText(line, index, smoothing) {
  const value = line.y[index];
  if (value === null || value === undefined) return "–";
  const envelope = line.low && line.low[index] !== line.high[index] ? `  (${number(line.low[index])} … ${number(line.high[index])})` : "";
  return `${number(value)}${envelope}${smoothing ? `  smoothed ${number(line.smooth[index])}` : ""}`;
}

// What the y axis covers: every mean, and the middle 96 % of the envelope, so that one spike does not flatten the rest.
function lineRange(lines, log) {
  const kept = (list) => (log ? list.filter((value) => value > 0) : list);
  const found = extent(lines.map((line) => kept(line.y)));
  if (!found) return null;
  let [low, high] = found;
  for (const line of lines.filter((other) => other.low)) {
    const lows = kept(line.low.filter((value) => value !== null)).sort((a, b) => a - b);
    const highs = kept(line.high.filter((value) => value !== null)).sort((a, b) => a - b);
    if (lows.length) low = Math.min(low, lows[Math.floor(lows.length * 0.02)]);
    if (highs.length) high = Math.max(high, highs[Math.ceil(highs.length * 0.98) - 1]);
  }
  // a bound is in view where that leaves the curve a third of the height; a band beyond it fills the chart
  const room = 2 * (high - low) || Infinity;
  for (const bound of lines.flatMap((line) => (line.guards ?? []).flatMap((guard) => [guard.low, guard.high]))) {
    if (bound === undefined || (log && bound <= 0) || bound < found[0] - room || bound > found[1] + room) continue;
    [low, high] = [Math.min(low, bound), Math.max(high, bound)];
  }
  if (low === high) return log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  return log ? [low, high] : [low - (high - low) * 0.04, high + (high - low) * 0.04];
}

function paintLine(context, line, scale, { log, smoothing, positive, marks, box }) {
  const stroke = runColour(line.run);
  context.setLineDash([]);
  if (line.low) paintBand(context, line, scale, stroke, log ? box.bottom : null);
  if (smoothing) strokePoints(context, line, line.y, scale, positive, faded(stroke, 0.3), 1);
  context.setLineDash(runDash(line.run));
  strokePoints(context, line, line.smooth, scale, positive, stroke, 1.8);
  context.setLineDash([2, 3]);
  context.strokeStyle = colour("soft");
  context.lineWidth = 1;
  for (const at of line.resumed ?? []) strokeLine(context, scale.x(at), box.top, scale.x(at), box.bottom);
  context.setLineDash([]);
  if (!marks && line.x.length > 1) return;
  context.fillStyle = stroke;
  line.smooth.forEach((value, index) => positive(value) && dot(context, scale.x(line.x[index]), scale.y(value), 3));
}

function strokePoints(context, { x: xs, breaks = [] }, ys, scale, positive, style, width) {
  context.strokeStyle = style;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.beginPath();
  for (let index = 0; index < xs.length; index += 1) {
    if (breaks.includes(index)) context.moveTo(scale.x(xs[index]), positive(ys[index]) ? scale.y(ys[index]) : 0);
    if (positive(ys[index])) context.lineTo(scale.x(xs[index]), scale.y(ys[index]));
  }
  context.stroke();
}

function paintBand(context, line, scale, stroke, floor) {
  const held = line.x.map((_, index) => index).filter((index) => line.low[index] !== null && (floor === null || line.high[index] > 0));
  context.fillStyle = faded(stroke, 0.18);
  context.beginPath();
  for (const index of held) context.lineTo(scale.x(line.x[index]), scale.y(line.high[index]));
  for (const index of held.reverse()) context.lineTo(scale.x(line.x[index]), floor !== null && line.low[index] <= 0 ? floor : scale.y(line.low[index]));
  context.fill();
}

const bandTexts = (lines) => [...new Set(lines.flatMap((line) => (line.guards ?? []).map((guard) => guard.band)))];
const eventTexts = (lines, x) => lines.flatMap((line) => (line.events ?? []).filter((event) => event.x === x).map((event) => `${lines.length > 1 ? `${line.label}: ` : ""}${event.words}`));

// Shades what is inside a guard's band, with a line at each of its bounds.
function paintGuards(context, line, scale, ys, log, box) {
  const shade = several ? runColour(line.run) : colour("good");
  for (const { low, high } of line.guards ?? []) {
    const at = (bound, none) => (bound === undefined || (log && bound <= 0) ? none : Math.max(box.top - 4, Math.min(box.bottom + 4, scale.y(bound))));
    const [top, bottom] = [at(high, box.top), at(low, box.bottom)];
    context.fillStyle = faded(shade, 0.12);
    context.fillRect(box.left, top, box.right - box.left, bottom - top);
    context.strokeStyle = faded(shade, 0.7);
    context.lineWidth = 1;
    for (const bound of [low, high]) if (bound >= ys[0] && bound <= ys[1] && (!log || bound > 0)) strokeLine(context, box.left, scale.y(bound), box.right, scale.y(bound));
  }
}

// Marks what happened: a tick at the foot of a chart for what was published, a line for all else, with a word where there is room.
function paintEvents(context, lines, scale, box) {
  const ends = Array(6).fill(-Infinity); // of the words in each row
  const written = new Set();
  context.lineWidth = 1.5;
  context.textAlign = "left";
  context.textBaseline = "top";
  for (const { x, kind } of lines.flatMap((line) => line.events ?? []).filter((event) => event.x !== undefined)) {
    const published = kind === "published";
    context.strokeStyle = context.fillStyle = colour(published ? "good" : "bad");
    strokeLine(context, scale.x(x), published ? box.bottom - 8 : box.top, scale.x(x), box.bottom);
    const wide = context.measureText(kind).width;
    const left = scale.x(x) + 3 + wide > box.right ? scale.x(x) - 3 - wide : scale.x(x) + 3;
    const row = ends.findIndex((end) => end <= left);
    if (published || row < 0 || written.has(`${x} ${kind}`)) continue;
    context.fillText(kind, left, box.top + 13 * row);
    ends[row] = left + wide + 4;
    written.add(`${x} ${kind}`);
  }
}

function dot(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

function paintCursor(context, lines, { box, place }, scale, positive) {
  context.strokeStyle = colour("soft");
  context.lineWidth = 1;
  const x = snap(lines, place.x);
  strokeLine(context, scale.x(x), box.top, scale.x(x), box.bottom);
  for (const line of lines) {
    const own = pointAt(line, x);
    context.fillStyle = runColour(line.run);
    if (own !== undefined && positive(line.smooth[own])) dot(context, scale.x(line.x[own]), scale.y(line.smooth[own]), 4);
  }
}

function paintNothing(context, box, text) {
  context.fillStyle = colour("soft");
  context.textAlign = "center";
  context.fillText(text, (box.left + box.right) / 2, (box.top + box.bottom) / 2);
}

// The unit in which the longest of the runs reads best, and its seconds.
function timeUnit(stage) {
  const longest = Math.max(0, ...runs.map((run) => run.curves[stage]?.time.at(-1) ?? 0));
  return longest < 180 ? ["s", 1] : longest < 10800 ? ["min", 60] : ["h", 3600];
}

// The lines of a metric: one of every run that has it.
function metricLines(metric, stage, axis) {
  return runs.flatMap((run, index) => {
    const curves = run.curves[stage];
    const values = curves?.metrics[metric];
    if (!values) return [];
    const [, size] = timeUnit(stage);
    const x = axis === "time" ? curves.time.map((seconds) => seconds / size) : curves.step;
    const resumed = curves.resumed.map((place) => x[place]);
    const guards = stage === "rl" ? run.guards.filter((guard) => guard.name === metric) : [];
    const events = guards.length ? run.events.map((event) => ({ ...event, x: x[nearest(curves.step, event.step)] })) : [];
    return [{ label: run.name, run: index, guards, events, x, y: values.mean, low: values.low, high: values.high, resumed, breaks: axis === "time" ? curves.resumed : [] }];
  });
}

function addCurves() {
  const stages = stagesOf(runs).filter((stage) => runs.some((run) => run.curves[stage]));
  if (!stages.length) return void addSection("curves", "Curves", el("p", { class: "soft" }, "No step has been logged yet."));
  const holder = el("div");
  const found = el("span", { class: "soft small", role: "status" });
  const filter = el("input", { type: "search", id: "metric-filter", placeholder: "reward, time/ …", "aria-keyshortcuts": "/", oninput: () => change({ filter: filter.value }) });
  const slider = el("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", oninput: () => change({ smoothing: Number(slider.value) }) });
  const log = el("input", { type: "checkbox", onchange: () => change({ log: log.checked }) });
  function change(settings) {
    Object.assign(view, settings);
    fillCurves(holder, found);
  }
  addSection(
    "curves", "Curves",
    el("div", { class: "controls" },
      stages.length > 1 && picker("Stage", stages.map((name) => [name, name]), view.stage, (stage) => change({ stage })),
      el("label", { class: "grow" }, "Metrics", filter),
      control("Smoothing", slider),
      el("label", {}, log, "Log axis"),
      radios("Over", "axis", [["step", "steps"], ["time", "time"]], view.axis, (axis) => change({ axis })),
      el("button", { type: "button", onclick: () => openAll(holder) }, "Open or close all"),
    ),
    several && legend(runs.map((run) => run.name), lineSwatch),
    found, holder,
  );
  change({});
}

function fillCurves(holder, found) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves[view.stage]?.metrics ?? {})))];
  const words = view.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = names.filter((name) => words.every((word) => name.includes(word)));
  const key = words.length ? [] : KEY_METRICS.filter((name) => chosen.includes(name));
  const areas = new Map(key.length ? [["key metrics", key]] : []);
  const order = (name) => (AREAS.indexOf(name) + AREAS.length + 1) % (AREAS.length + 1);
  for (const name of chosen) areas.set(name.split("/")[0], [...(areas.get(name.split("/")[0]) ?? []), name]);
  const sorted = [...areas].sort(([a], [b]) => (b === "key metrics") - (a === "key metrics") || order(a) - order(b) || (a < b ? -1 : 1));
  fill(found, curveText(chosen.length, names.length));
  fill(holder, sorted.map(([area, metrics]) => areaNode(area, metrics, words.length > 0 || (view.opened.get(area) ?? area === "key metrics"))));
}

function openAll(holder) {
  const areas = [...holder.querySelectorAll("details")];
  const open = areas.some((node) => !node.open);
  for (const node of areas) node.open = open;
}

function curveText(chosen, total) {
  const rows = Math.max(...runs.map((run) => run.curves[view.stage]?.rows ?? 0));
  const points = Math.max(...runs.map((run) => run.curves[view.stage]?.step.length ?? 0));
  const grouped = rows > points ? ` ${count(rows)} steps are drawn as ${count(points)} points: the line is their mean, the band their least to greatest.` : "";
  const resumed = runs.some((run) => run.curves[view.stage]?.resumed.length) ? " A dotted upright line marks a resume." : "";
  const guarded = runs.some((run) => run.guards.length) ? " The band of a guard is shaded; a mark at the foot is a publication, an upright line what else happened." : "";
  const time = view.axis === "time" ? ` Time is in ${{ s: "seconds", min: "minutes", h: "hours" }[timeUnit(view.stage)[0]]} since the run began.` : "";
  return `${count(chosen)} of ${plural(total, "metric", "metrics")}.${grouped}${resumed}${guarded}${time}`;
}

function areaNode(area, metrics, open) {
  const grid = el("div", { class: "charts" });
  const { stage, axis, log, smoothing } = view;
  const draw = () => grid.childElementCount || grid.append(...metrics.map((metric) => lineChart({ title: metric, lines: metricLines(metric, stage, axis), axis, log, smoothing })));
  const summary = el("summary", {}, el("h3", {}, area), el("span", { class: "count" }, metrics.length));
  const toggled = () => {
    if (node.open) draw();
    if (!view.filter.trim()) view.opened.set(area, node.open); // what a search opens is not kept open after it
  };
  const node = el("details", { class: "area", ontoggle: toggled }, summary, grid);
  node.open = open;
  if (open) draw();
  return node;
}
