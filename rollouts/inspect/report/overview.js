// What the run is, what went wrong, what was set.
function addOverview() {
  const first = runs[0];
  byId("title").textContent = runs.map((run) => run.name).join(" · ");
  if (!several) {
    const state = byId("state");
    state.textContent = first.state;
    state.classList.add(first.state === "finished" ? "good" : "soft");
    state.classList.remove("hidden");
  }
  const facts = [...new Set(runs.flatMap((run) => run.facts.map(([name]) => name)))];
  const fact = (run, name) => run.facts.find(([key]) => key === name)?.[1] ?? "";
  addSection(
    "overview", several ? `Comparison of ${runs.length} runs` : "Overview",
    several ? null : el("div", { class: "tiles" }, first.tiles.map(({ name, value, note }) => el("div", { class: "tile" }, el("div", { class: "name" }, name), el("div", { class: "value" }, value), el("div", { class: "note" }, note)))),
    several
      ? table([["", ""], ...runs.map((run) => [run.name, "wrap"])], [...tileRows(), ...facts.map((name) => [name, ...runs.map((run) => fact(run, name))])], { label: "Runs" })
      : el("dl", { class: "facts" }, first.facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    !several && first.stages.length > 0 && stageTable(first),
    runs.some((run) => run.notes.length) && el("p", { class: "soft small" }, runs.flatMap((run) => run.notes).join("; ")),
  );
}

function tileRows() {
  const names = [...new Set(runs.flatMap((run) => run.tiles.map((tile) => tile.name)))];
  return names.map((name) => [name, ...runs.map((run) => {
    const tile = run.tiles.find((other) => other.name === name);
    return tile ? `${tile.value}${tile.note ? ` (${tile.note})` : ""}` : "";
  })]);
}

const stageTable = (run) => rowTable(run.outcomes, { caption: "Stages" });

// A table of rows as inspect prints them, captioned by their title: the name of a column of numbers begins with ">", that of a drawing with "|". `more`: of a row, its last cell.
function rowTable(rows, { caption = titled(rows[0].title), more = null } = {}) {
  const names = [...new Set(rows.flatMap(Object.keys))].filter((name) => name !== "title");
  const columns = names.map((name) => [name.replace(/[>|]/, ""), name.startsWith(">") ? "number" : name.startsWith("|") ? "course" : name.startsWith("parts") || name === "words" ? "wrap" : "line"]);
  const cells = rows.map((row) => [...names.map((name) => (typeof row[name] === "number" ? count(row[name]) : row[name])), ...(more ? [more(row)] : [])]);
  return table(more ? [...columns, ["", ""]] : columns, cells, { caption, tall: rows.length > 20 });
}

// The guards of the runs that have any, the newest of what happened first, and the samples that moved the weights most.
function addGuardrails() {
  const kept = runs.map((run, index) => [run, index]).filter(([run]) => run.guardrails.length || run.events.length || run.mattered.length);
  if (!kept.length) return;
  addSection("guardrails", "Guardrails", kept.flatMap(([run, index]) => {
    const message = (row) => ({ stage: row.stage, step: row[">step"], sample: row.id });
    const show = (row) => hasSample(index, message(row)) && el("button", { type: "button", class: "plain", onclick: () => showSample(index, message(row)) }, "show it");
    const events = run.events.toReversed().map(({ time, stage, step, words }) => ({ time, stage, ">step": step, words }));
    return [
      several && el("h3", {}, run.name),
      run.guardrails.length > 0 && rowTable(run.guardrails),
      guardCharts(run, index),
      events.length > 0 && rowTable(events, { caption: "What happened, the newest first" }),
      run.mattered.length > 0 && rowTable(run.mattered, { more: show }),
    ];
  }));
}

// The curves of the guarded metrics of a run, over its steps.
function guardCharts(run, index) {
  const names = [...new Set(run.guardrails.map((row) => row.guard))];
  return names.length > 0 && el("div", { class: "charts" }, names.map((title) => lineChart({ title, axis: "step", lines: metricLines(title, "rl", "step").filter((line) => line.run === index) })));
}

function addDifferences() {
  if (!several) return;
  const settings = runs.map((run) => new Map(run.config));
  const names = [...new Set(settings.flatMap((own) => [...own.keys()]))].filter((key) => key !== "output.dir");
  const differing = names.map((key) => [key, settings.map((own) => own.get(key))]).filter(([, values]) => new Set(values).size > 1);
  const rows = differing.map(([key, values]) => [el("span", { class: "mono" }, key), ...values.map((value) => el("span", { class: "mono" }, value ?? "–"))]);
  addSection(
    "differences", "Settings that differ",
    rows.length ? table([["setting", ""], ...runs.map((run) => [run.name, "wrap"])], rows, { label: "Settings that differ" }) : el("p", { class: "soft" }, "None but the run's directory."),
  );
}

function addFailures() {
  const parts = runs.flatMap((run, index) => failureParts(run, index));
  addSection("failures", "Failures", parts.length ? parts : el("p", { class: "soft" }, "No sample failed, no group was dropped, no step was skipped."));
}

function failureParts(run, index) {
  const { classes, messages, trouble, dropped } = run.failures;
  const parts = [];
  if (classes.length) parts.push(classTable(run, classes));
  if (messages.length) parts.push(messageTable(run, index, messages));
  const bars = [...dropped.map(([name, total]) => [`groups dropped: ${name}`, count(total)]), ...trouble.map(({ what, total }) => [what, number(total)])];
  if (bars.length) parts.push(table([["what", ""], ["how often", "number"]], bars, { caption: "Dropped and skipped" }));
  return several && parts.length ? [el("h3", {}, run.name), ...parts] : parts;
}

function classTable(run, classes) {
  const rows = classes.map(({ name, total, steps, first, last }) => [name, count(total), count(steps), first === last ? count(first) : `${count(first)} to ${count(last)}`, sparkBars(run, name)]);
  return table([["class", ""], ["samples", "number"], ["steps with any", "number"], ["in steps", "number"], ["over the run", ""]], rows, { caption: "Samples that failed, by class" });
}

// Failures over the run as small bars, one of each twentieth of the steps.
function sparkBars(run, name) {
  const counts = run.failures.classes.find((other) => other.name === name).spread;
  const most = Math.max(...counts, 1);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of Object.entries({ viewBox: `0 0 ${counts.length * 6} 20`, width: counts.length * 6, height: 20, role: "img", "aria-label": `by step range: ${counts.join(", ")}` })) svg.setAttribute(key, value);
  counts.forEach((value, place) => {
    const rect = document.createElementNS(svg.namespaceURI, "rect");
    const height = value ? Math.max(2, (20 * value) / most) : 1;
    for (const [key, number] of Object.entries({ x: place * 6, y: 20 - height, width: 5, height })) rect.setAttribute(key, number);
    rect.style.fill = value ? "var(--bad)" : "var(--line)";
    svg.append(rect);
  });
  return svg;
}

function messageTable(run, index, messages) {
  const rows = messages.map((message) => [
    message.class, count(message.count), message.first === message.last ? count(message.first) : `${count(message.first)} to ${count(message.last)}`,
    el("div", {}, el("span", { class: "mono" }, message.text), message.function && el("div", { class: "soft small" }, message.function)),
    hasSample(index, message) ? el("button", { type: "button", class: "plain", onclick: () => showSample(index, message) }, "show one") : "",
  ]);
  const more = run.failures.more ? `, the ${count(messages.length)} most frequent of ${count(messages.length + run.failures.more)}` : "";
  const columns = [["class", ""], ["samples", "number"], ["in steps", "number"], ["message", "wrap"], ["", ""]];
  return table(columns, rows, { caption: `Messages of the logged samples that failed${more}`, tall: true });
}

function addUpdates() {
  const kept = runs.filter((run) => run.updates.lines.length);
  if (!kept.length) return;
  addSection("updates", "Weight updates", kept.flatMap((run) => {
    const { columns, lines, total, unread } = run.updates;
    const shown = total > lines.length ? ` ${count(lines.length)} of ${count(total)} are shown: the newest.` : "";
    const left = unread ? ` ${count(unread)} more ${unread === 1 ? "line is" : "lines are"} torn or of another form.` : "";
    const body = lines.map((cells) => (columns.length ? cells : [el("span", { class: "mono" }, cells[0])]));
    const heads = columns.length ? columns.map((name, place) => [name, place === 0 ? "line" : place > 2 && name !== "note" ? "number" : ""]) : [["update", "wrap"]];
    return [several && el("h3", {}, run.name), el("p", { class: "soft" }, `One line for each update of the weights, from updates.log.${shown}${left}`), table(heads, body, { tall: true, label: "Weight updates" })];
  }));
}

function addSettings() {
  const rows = runs.flatMap((run, index) => run.config.map(([key, value]) => ({ index, key, value })));
  if (!rows.length) return;
  const state = { run: "0", text: "" };
  const holder = el("div");
  const found = el("p", { class: "soft small", role: "status" });
  const search = el("input", { type: "search", id: "config-filter", placeholder: "lr, rollout …", "aria-keyshortcuts": "/", oninput: () => change({ text: search.value }) });
  const change = (settings) => {
    Object.assign(state, settings);
    const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
    const own = rows.filter(({ index }) => String(index) === state.run);
    const shown = own.filter(({ key, value }) => words.every((word) => `${key} = ${value}`.toLowerCase().includes(word)));
    found.textContent = `${count(shown.length)} of ${plural(own.length, "setting", "settings")}`;
    fill(holder, table([["setting", ""], ["value", "wrap"]], shown.map(({ key, value }) => [el("span", { class: "mono" }, key), el("span", { class: "mono" }, value)]), { tall: true, label: "Settings" }));
  };
  addSection(
    "settings", "Settings",
    el("div", { class: "controls" },
      several && picker("Run", runs.map((run, index) => [String(index), run.name]), "0", (run) => change({ run })),
      el("label", { class: "grow" }, "Search", search),
    ),
    found, holder,
  );
  change({});
}
