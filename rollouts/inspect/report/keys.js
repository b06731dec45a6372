// Keys, the table of contents, printing; and the start.
const KEYS = [
  ["?", "these shortcuts", () => byId("keys").showModal()],
  ["/", "search: metrics, samples or settings, whichever is in view", () => focusSearch()],
  ["j", "next sample (also ↓ in the list)", () => sampleKey(() => moveSample(1))],
  ["k", "sample before (also ↑ in the list)", () => sampleKey(() => moveSample(-1))],
  ["[", "step before, of samples", () => sampleKey(() => moveStep(-1))],
  ["]", "step after, of samples", () => sampleKey(() => moveStep(1))],
  ["c", "go to the curves", () => goTo("curves")],
  ["s", "go to the samples", () => goTo("samples")],
  ["t", "theme: system, light, dark", nextTheme],
];
const MORE_KEYS = [["← →", "read a chart's values, when it has the focus"], ["Esc", "leave a search field or this list"]];
const SEARCHES = [["curves", "metric-filter"], ["samples", "sample-filter"], ["settings", "config-filter"]];

// The search of the section that has the focus, else of the one nearest to the middle of the window.
function focusSearch() {
  const own = document.activeElement.closest?.("section")?.id;
  const distance = (id) => {
    if (id === own) return -1;
    const { top, bottom } = byId(id).getBoundingClientRect();
    return Math.max(0, top - innerHeight / 2, innerHeight / 2 - bottom);
  };
  const found = SEARCHES.filter(([, input]) => byId(input)).sort(([a], [b]) => distance(a) - distance(b))[0];
  if (found) byId(found[1]).focus();
}

function goTo(id) {
  const node = byId(id);
  if (!node) return;
  node.scrollIntoView({ behavior: "instant" });
  byId(`${id}-title`).focus({ preventScroll: true });
}

function sampleKey(act) {
  if (!parts.list) return;
  const { top, bottom } = byId("samples").getBoundingClientRect();
  if (bottom < 80 || top > innerHeight - 80) byId("samples").scrollIntoView({ behavior: "instant" });
  act();
}

// Whether the field itself has a use for the key: text fields for all of them, lists for letters.
function takesKey(field, key) {
  return field.tagName === "SELECT" ? /[a-z]/i.test(key) : !["checkbox", "radio", "range"].includes(field.type);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
  const field = event.target.closest?.("input, select, textarea");
  if (field && event.key === "Escape") return field.blur();
  if (field && takesKey(field, event.key)) return;
  const found = KEYS.find(([key]) => key === event.key);
  if (!found) return;
  event.preventDefault();
  found[2]();
}

function fillKeys() {
  const rows = [...KEYS, ...MORE_KEYS].map(([key, what]) => [el("kbd", {}, key), what]);
  fill(byId("keys"),
    el("h2", { id: "keys-title" }, "Keyboard"),
    table([["key", ""], ["what it does", "wrap"]], rows, { label: "Shortcuts" }),
    el("p", {}, el("button", { type: "button", onclick: () => byId("keys").close() }, "Close")));
}

function addContents() {
  const links = sections.map(({ id, title }) => el("a", { href: `#${id}` }, title));
  fill(byId("toc"), links);
  const mark = () => {
    const at = sections.findLastIndex(({ node }) => node.getBoundingClientRect().top < innerHeight * 0.35);
    links.forEach((link, index) => (index === Math.max(0, at) ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
  };
  addEventListener("scroll", mark, { passive: true });
  mark();
}

function drawAll() {
  for (const canvas of document.querySelectorAll("figure canvas")) drawChart(chartOf.get(canvas));
}

let themeBefore = theme;
addEventListener("beforeprint", () => {
  themeBefore = theme;
  setTheme("light");
  drawAll();
});
addEventListener("afterprint", () => setTheme(themeBefore));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);
document.addEventListener("keydown", onKey);
byId("theme").addEventListener("click", nextTheme);
byId("help").addEventListener("click", () => byId("keys").showModal());

for (const add of [addOverview, addDifferences, addGuardrails, addCurves, addPhases, addSpreads, addFailures, addSamples, addEvaluations, addUpdates, addSettings]) add();
addContents();
fillKeys();
setTheme("auto");
const made = new Date(report.made * 1000).toISOString().replace("T", " ").slice(0, 16);
byId("main").append(el("p", { class: "soft small" }, `Written by rollouts ${report.version} on ${made} UTC. This file loads nothing from elsewhere.`));
document.documentElement.dataset.ready = "true";
