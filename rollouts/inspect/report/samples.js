// The sample browser.
const browse = { run: 0, stage: "", step: "all", sort: "file", status: "all", low: "", high: "", text: "", group: null, colouring: "plain", shown: [], at: 0, limit: 200 };
const parts = {}; // the elements that change

const SORTS = [
  ["file", "as logged"], ["reward-", "reward, best first"], ["reward+", "reward, worst first"], ["response_length-", "response, longest first"], ["response_length+", "response, shortest first"],
];
const textCache = new Map(); // of samples: what a search looks at

function promptText(sample) {
  if (sample.turns) return sample.turns.map((turn) => turn.text).join("\n");
  return typeof sample.prompt === "string" ? sample.prompt : (sample.prompt ?? []).map((turn) => messageText(turn.content)).join("\n");
}

function messageText(content) {
  return typeof content === "string" ? content : JSON.stringify(content);
}

function searchText(sample) {
  if (!textCache.has(sample)) textCache.set(sample, `${sample.id}\n${promptText(sample)}\n${sample.response ?? ""}\n${JSON.stringify(sample.metadata ?? "")}`.toLowerCase());
  return textCache.get(sample);
}

function sortSamples(samples, order) {
  if (order === "file") return samples;
  const [field, sign] = [order.slice(0, -1), order.endsWith("+") ? 1 : -1];
  const last = (sample) => sample[field] === undefined; // those without a value come last in either direction
  return [...samples].sort((a, b) => last(a) - last(b) || (last(a) ? 0 : sign * (a[field] - b[field])));
}

const HOW = "newest steps, failed, best rewards, worst rewards, and steps evenly"; // in which order they were chosen

function findSamples() {
  const needle = browse.text.toLowerCase();
  const inRange = (reward) => (browse.low === "" || reward >= Number(browse.low)) && (browse.high === "" || reward <= Number(browse.high));
  const unbounded = browse.low === "" && browse.high === "";
  const kept = sampleRows[browse.run].filter((sample) =>
    sample.stage === browse.stage &&
    (browse.step === "all" || sample.step === Number(browse.step)) &&
    (browse.status === "all" || sample.status === browse.status) &&
    (unbounded || (sample.reward !== undefined && inRange(sample.reward))) &&
    (browse.group === null || sample.group_index === browse.group) &&
    (!needle || searchText(sample).includes(needle)),
  );
  return sortSamples(kept, browse.sort);
}

const sampleStages = (run) => [...new Set(sampleRows[run].map((sample) => sample.stage))];
const sampleSteps = () => [...new Set(sampleRows[browse.run].filter((sample) => sample.stage === browse.stage).map((sample) => sample.step))].sort((a, b) => a - b);
const sampleStatuses = () => [...new Set(sampleRows[browse.run].map((sample) => sample.status ?? ""))].filter(Boolean).sort();

function addSamples() {
  if (!sampleRows.some((rows) => rows.length)) {
    addSection("samples", "Samples", el("p", { class: "soft" }, "No sample has been logged."));
    return;
  }
  browse.run = sampleRows.findIndex((rows) => rows.length);
  const input = (type, key, attributes) => {
    const node = el("input", { type, ...attributes, oninput: () => changeBrowse({ [key]: node.value }) });
    return node;
  };
  parts.controls = el("div", { class: "controls" });
  parts.list = el("ul", { role: "listbox", tabindex: "0", id: "sample-list", "aria-label": "Samples", "aria-keyshortcuts": "j k", onkeydown: listKey });
  parts.more = el("div", { class: "more" });
  parts.count = el("p", { class: "soft small", role: "status", id: "sample-count" });
  parts.detail = el("article", { id: "sample", "aria-label": "Sample", tabindex: "-1" });
  parts.text = input("search", "text", { id: "sample-filter", placeholder: "in messages, response, metadata", "aria-keyshortcuts": "/" });
  parts.low = input("number", "low", { step: "any", placeholder: "from", "aria-label": "Least reward" });
  parts.high = input("number", "high", { step: "any", placeholder: "to", "aria-label": "Greatest reward" });
  addSection("samples", "Samples", parts.controls, parts.count, el("div", { class: "browser" }, el("div", { class: "list" }, parts.list, parts.more), parts.detail));
  const stages = sampleStages(browse.run);
  changeBrowse({ stage: stages.includes(mainStage()) ? mainStage() : stages[0] });
}

function fillControls() {
  const steps = sampleSteps();
  const at = steps.indexOf(Number(browse.step));
  const stepper = el("select", { id: "sample-step", "aria-label": "Step", "aria-keyshortcuts": "[ ]", onchange: () => changeBrowse({ step: stepper.value }) },
    el("option", { value: "all" }, "all"), steps.map((step) => el("option", { value: step }, count(step))));
  stepper.value = browse.step;
  fill(parts.controls,
    several && picker("Run", runs.map((run, index) => [String(index), run.name]), String(browse.run), (run) => changeRun(Number(run))),
    picker("Stage", sampleStages(browse.run).map((name) => [name, name]), browse.stage, (stage) => changeBrowse({ stage, step: "all", group: null })),
    el("span", { class: "choice" }, control("Step", stepper),
      el("button", { type: "button", "aria-label": "Step before", title: "Step before: [", disabled: at === 0, onclick: () => moveStep(-1) }, "‹"),
      el("button", { type: "button", "aria-label": "Step after", title: "Step after: ]", disabled: at === steps.length - 1, onclick: () => moveStep(1) }, "›")),
    picker("Sort", SORTS, browse.sort, (sort) => changeBrowse({ sort })),
    picker("Status", [["all", "all"], ...sampleStatuses().map((status) => [status, status])], browse.status, (status) => changeBrowse({ status })),
    el("span", { class: "choice" }, control("Reward", parts.low), parts.high),
    el("label", { class: "grow" }, "Text", parts.text),
    browse.group !== null && el("button", { type: "button", onclick: () => changeBrowse({ group: null }) }, `group ${browse.group} ✕`),
  );
}

function changeRun(run) {
  const stages = sampleStages(run);
  changeBrowse({ run, step: "all", group: null, status: "all", stage: stages.includes(browse.stage) ? browse.stage : (stages[0] ?? "") });
}

// Sets what is looked for. The focus stays where it is, also when its control is made anew.
function changeBrowse(settings) {
  const focus = document.activeElement?.id || document.activeElement?.getAttribute?.("aria-label");
  Object.assign(browse, settings);
  browse.shown = findSamples();
  browse.limit = 200;
  if (!("text" in settings || "low" in settings || "high" in settings)) fillControls();
  const kept = runs[browse.run].samples;
  const all = kept.shown === kept.total ? "all" : count(kept.shown);
  fill(parts.count, `${plural(browse.shown.length, "sample", "samples")} found. The report holds ${all} of the ${count(kept.total)} that were logged${kept.shown < kept.total ? `: ${HOW}` : ""}.`);
  selectSample(0, false);
  const again = focus && parts.controls && [...parts.controls.querySelectorAll("[id],[aria-label]")].find((node) => node.id === focus || node.getAttribute("aria-label") === focus);
  if (again && again !== document.activeElement) again.focus({ preventScroll: true });
}

function moveStep(by) {
  const steps = sampleSteps();
  const from = browse.step === "all" ? (by > 0 ? -1 : steps.length) : steps.indexOf(Number(browse.step));
  const next = Math.max(0, Math.min(steps.length - 1, from + by));
  if (steps.length) changeBrowse({ step: String(steps[next]) });
  announce(`Step ${browse.step}`);
}

function fillList() {
  fill(parts.list, browse.shown.slice(0, browse.limit).map((sample, index) => sampleItem(sample, index)));
  const rest = browse.shown.length - browse.limit;
  fill(parts.more, rest > 0 && el("button", { type: "button", onclick: () => { browse.limit += 200; fillList(); markItem(true); } }, `${count(rest)} more`));
}

function sampleItem(sample, index) {
  const failed = sample.status === "failed";
  return el("li", { role: "option", id: `sample-${index}`, "aria-selected": "false", onclick: () => selectSample(index, true) },
    el("div", { class: "line" },
      el("b", {}, sample.reward === undefined ? "–" : number(sample.reward)),
      el("span", { class: failed ? "bad" : null }, failed ? `✕ ${sample.status}` : (sample.status ?? "")),
      el("span", { class: "right" }, `step ${count(sample.step)} · ${count(sample.response_length ?? 0)} tok`)),
    el("div", { class: sample.response ? "snippet" : "snippet soft" }, (sample.response || "(empty)").slice(0, 160)));
}

function selectSample(index, scroll) {
  browse.at = Math.max(0, Math.min(browse.shown.length - 1, index));
  if (browse.at >= browse.limit || !scroll) {
    while (browse.at >= browse.limit) browse.limit += 200;
    fillList();
  }
  markItem(scroll);
  fillDetail();
}

function markItem(scroll) {
  for (const node of parts.list.querySelectorAll('[aria-selected="true"]')) node.setAttribute("aria-selected", "false");
  const node = byId(`sample-${browse.at}`);
  if (!node) return parts.list.removeAttribute("aria-activedescendant");
  node.setAttribute("aria-selected", "true");
  parts.list.setAttribute("aria-activedescendant", node.id);
  const box = parts.list.parentElement;
  const above = node.offsetTop - box.scrollTop;
  if (scroll && (above < 0 || above + node.offsetHeight > box.clientHeight)) box.scrollTop = node.offsetTop - box.clientHeight / 3;
}

function moveSample(by) {
  if (!browse.shown.length) return;
  selectSample(browse.at + by, true);
  const sample = browse.shown[browse.at];
  announce(`Sample ${browse.at + 1} of ${browse.shown.length}, reward ${number(sample.reward)}, ${sample.status ?? ""}`);
}

function listKey(event) {
  const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 }[event.key];
  if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  moveSample(by);
}

// The sample that a table names, wherever it is in the browser.
const matches = (message) => (sample) => sample.id === message.sample && sample.step === message.step && sample.stage === message.stage;
const hasSample = (run, message) => message.sample !== undefined && sampleRows[run].some(matches(message));

function showSample(run, message) {
  Object.assign(browse, { run, status: "all", low: "", high: "", text: "", group: null, sort: "file" });
  for (const name of ["text", "low", "high"]) parts[name].value = "";
  changeBrowse({ stage: message.stage, step: String(message.step) });
  selectSample(browse.shown.findIndex(matches(message)), true);
  byId("samples").scrollIntoView({ behavior: "instant" });
  parts.detail.focus({ preventScroll: true });
}
