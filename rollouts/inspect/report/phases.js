// Where a step's time goes, how rewards and lengths are spread, evaluations.
const phaseView = { stage: mainStage(), run: 0, share: false };

function addPhases() {
  const stages = stagesOf(runs).filter((stage) => runs.some((run) => run.phases[stage]));
  if (!stages.length) return;
  if (!stages.includes(phaseView.stage)) phaseView.stage = stages.at(-1);
  const holder = el("div");
  const change = (settings) => {
    Object.assign(phaseView, settings);
    fillPhases(holder);
  };
  addSection(
    "time", "Time by phase",
    el("div", { class: "controls" },
      several && picker("Run", runs.map((run, index) => [String(index), run.name]), "0", (run) => change({ run: Number(run) })),
      stages.length > 1 && picker("Stage", stages.map((name) => [name, name]), phaseView.stage, (stage) => change({ stage })),
      radios("As", "phase-unit", [["seconds", "seconds a step"], ["share", "share of the step"]], "seconds", (unit) => change({ share: unit === "share" })),
    ),
    holder,
  );
  change({});
}

function fillPhases(holder) {
  const run = runs[phaseView.run];
  const phases = run.phases[phaseView.stage];
  if (!phases) return fill(holder, el("p", { class: "soft" }, `${run.name} has no stage ${phaseView.stage}.`));
  const x = run.curves[phaseView.stage].step;
  const totals = x.map((_, index) => phases.names.reduce((sum, name) => sum + (phases.seconds[name][index] ?? 0), 0));
  const layers = phases.names.map((name) => phases.seconds[name].map((value, index) => (value ?? 0) / (phaseView.share ? totals[index] || 1 : 1)));
  const all = phases.names.reduce((sum, name) => sum + phases.total[name], 0);
  const rows = phases.names.map((name, index) => [
    el("span", { class: "named" }, boxSwatch(index), name), duration(phases.total[name]), percent(phases.total[name] / (all || 1)), duration(phases.total[name] / phases.rows),
  ]);
  fill(
    holder,
    el("div", { class: "charts wide" }, stackChart({ title: phaseView.share ? "Share of the step" : "Seconds a step", x, layers, names: phases.names, totals, share: phaseView.share })),
    legend(phases.names, boxSwatch),
    table([["phase", ""], ["in all", "number"], ["share", "number"], ["a step", "number"]], rows, { label: "Time by phase" }),
    phases.ahead && el("p", { class: "soft small" }, "Phases run beside each other here, so that they sum to more than the step."),
  );
}

function stackChart({ title, x, layers, names, totals, share }) {
  const tops = layers.reduce((sums, layer) => [...sums, layer.map((value, index) => value + (sums.at(-1)?.[index] ?? 0))], []);
  const xs = x.length > 1 ? [x[0], x.at(-1)] : [x[0] - 0.5, x[0] + 0.5];
  const sorted = [...tops.at(-1)].sort((a, b) => a - b);
  const ys = [0, share ? 1 : (sorted[Math.ceil(sorted.length * 0.99) - 1] || 1) * 1.05];
  const text = (index) =>
    [`step ${count(x[index])}: ${duration(totals[index])}`, ...names.map((name, layer) => `${name}: ${share ? percent(layers[layer][index]) : duration(layers[layer][index])}`)].join("\n");
  return addChart({
    title, height: 240, note: `last ${duration(totals.at(-1))}`,
    summary: `Stacked areas of ${names.join(", ")} over ${count(x.length)} points.`,
    at: (at, _, { box }) => (at < box.left - 8 ? null : nearest(x, xs[0] + ((at - box.left) / (box.right - box.left)) * (xs[1] - xs[0]))),
    step: (old, dx) => Math.max(0, Math.min(x.length - 1, (old ?? (dx > 0 ? -1 : x.length)) + dx)),
    pixel: (index, { box }) => scales(box, xs, ys, false).x(x[index]),
    describe: text,
    paint(context, chart) {
      const { box } = chart;
      const scale = scales(box, xs, ys, false);
      paintAxes(context, chart, xs, ys, scale);
      context.save();
      context.beginPath();
      context.rect(box.left, box.top, box.right - box.left, box.bottom - box.top);
      context.clip();
      tops.forEach((top, layer) => paintLayer(context, x, top, tops[layer - 1] ?? top.map(() => 0), scale, colour(`series-${layer % SERIES}`)));
      context.restore();
      if (chart.place === null) return;
      context.strokeStyle = colour("text");
      context.lineWidth = 1;
      strokeLine(context, scale.x(x[chart.place]), box.top, scale.x(x[chart.place]), box.bottom);
    },
  });
}

function paintLayer(context, xs, top, floor, scale, style) {
  context.fillStyle = style;
  context.beginPath();
  if (xs.length === 1) context.rect(scale.x(xs[0]) - 20, scale.y(top[0]), 40, scale.y(floor[0]) - scale.y(top[0]));
  xs.forEach((x, index) => context.lineTo(scale.x(x), scale.y(top[index])));
  for (let index = xs.length - 1; index >= 0; index -= 1) context.lineTo(scale.x(xs[index]), scale.y(floor[index]));
  context.fill();
  context.strokeStyle = colour("card");
  context.lineWidth = 1;
  context.beginPath();
  xs.forEach((x, index) => context.lineTo(scale.x(x), scale.y(top[index])));
  context.stroke();
}

const SPREADS = [
  ["reward", "Reward", (low, high) => `reward ${number(low)} … ${number(high)}`],
  ["length", "Response length, tokens", (low, high) => `${number(low)} … ${number(high)} tokens`],
  ["lag", "Staleness, versions behind the trainer", (low, high) => `${number(low)} … ${number(high)} versions`],
];

function addSpreads() {
  const kept = runs.map((run) => run.spreads);
  const stages = [...new Set(kept.flatMap((spreads) => Object.keys(spreads)))];
  if (!stages.length) return;
  const state = { stage: stages.includes(mainStage()) ? mainStage() : stages[0], run: 0 };
  const holder = el("div");
  const change = (settings) => {
    Object.assign(state, settings);
    const spreads = kept[state.run][state.stage];
    fill(holder, spreads ? spreadCharts(spreads) : el("p", { class: "soft" }, `${runs[state.run].name} has no samples of ${state.stage}.`));
  };
  addSection(
    "spread", "Distributions",
    el("p", { class: "soft" }, "Of the logged samples. A column is a range of steps, a cell the share of its samples; the line is the mean."),
    el("div", { class: "controls" },
      several && picker("Run", runs.map((run, index) => [String(index), run.name]), "0", (run) => change({ run: Number(run) })),
      stages.length > 1 && picker("Stage", stages.map((name) => [name, name]), state.stage, (stage) => change({ stage })),
    ),
    holder,
  );
  change({});
}

function spreadCharts(spreads) {
  const fresh = spreads.lag?.edges.length === 2; // one bin: nothing was stale
  const charts = SPREADS.filter(([key]) => spreads[key] && !(key === "lag" && fresh)).map(([key, title, text]) => {
    const { steps, edges, counts, means } = spreads[key];
    const samples = counts.flat().reduce((sum, value) => sum + value, 0);
    const wholeNumbers = key !== "reward" && edges[1] - edges[0] === 1 && edges[0] === -0.5;
    return heatChart({
      title, height: 230, note: plural(samples, "sample", "samples"), columns: steps, edges, counts, means,
      columnText: ([first, last]) => (first === last ? `step ${count(first)}` : `steps ${count(first)} to ${count(last)}`),
      binText: (bin) => (wholeNumbers ? `${key === "lag" ? plural(bin, "version", "versions") : plural(bin, "token", "tokens")}${spreads[key].more && bin === edges.length - 2 ? " or more" : ""}` : text(edges[bin], edges[bin + 1])),
      summary: `Means of the step ranges: ${means.map(number).join(", ")}.`,
    });
  });
  return [el("div", { class: "charts" }, charts), fresh && el("p", { class: "soft" }, "Staleness: every sample was made by the weights that it then trained.")];
}

function addEvaluations() {
  const rows = runs.flatMap((run, index) => run.evaluations.map((row) => ({ ...row, run: index })));
  if (!rows.length) return;
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.metrics)))];
  const main = names.filter((name) => /\/((avg|maj|pass)@\d+|accuracy|rewards\/margins)$/.test(name));
  const lines = (metric) => runs.flatMap((run, index) => {
    const own = run.evaluations.filter((row) => metric in row.metrics);
    if (!own.length) return [];
    return [{ label: run.name, run: index, x: own.map((_, place) => place + 1), y: own.map((row) => row.metrics[metric]), low: null, high: null, names: own.map((row) => `${row.stage}, step ${count(row.step)}`) }];
  });
  const columns = [...(several ? [["run", ""]] : []), ["stage", ""], ["step", "number"], ["version", "number"], ["name", ""], ...names.map((name) => [name.split("/").slice(2).join("/"), "number"])];
  const body = rows.map((row) => [
    ...(several ? [runs[row.run].name] : []), row.stage, count(row.step), row.version === null ? "" : count(row.version), row.name,
    ...names.map((name) => (name in row.metrics ? number(row.metrics[name]) : "")),
  ]);
  addSection(
    "evaluations", "Evaluations",
    several && legend(runs.map((run) => run.name), lineSwatch),
    main.length > 0 && el("p", { class: "soft" }, "In the order in which they were made."),
    el("div", { class: "charts" }, main.map((metric) => lineChart({ title: metric, lines: lines(metric), axis: "evaluation", marks: true }))),
    table(columns, body, { tall: true, label: "Evaluations" }),
  );
}
