// Data, elements, numbers, colours and themes.
const byId = (id) => document.getElementById(id);
const report = JSON.parse(byId("report-data").textContent);
const sampleRows = JSON.parse(byId("sample-data").textContent); // of each run
const runs = report.runs;
const several = runs.length > 1;
const SERIES = 7; // colours; a further run repeats them with another dash
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3]];

// An element: attributes (on… are listeners), then children; null children are left out. Text is only ever set as text.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "value" || name === "checked" || name === "disabled" || name === "open") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const count = (value) => whole.format(value);

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (Number.isInteger(value) && size < 1e7) return count(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return count(value);
  return String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${number(seconds)} s`;
  if (seconds < 120) return `${Number(seconds.toFixed(seconds < 10 ? 1 : 0))} s`;
  if (seconds < 7200) return `${Number((seconds / 60).toFixed(1))} min`;
  return `${Number((seconds / 3600).toFixed(1))} h`;
}

const plural = (n, one, many) => `${count(n)} ${n === 1 ? one : many}`;
const percent = (share) => `${number(Number((100 * share).toFixed(1)))} %`;

// Colours: what the theme makes of a custom property, as the canvas takes it.
const colourCache = new Map();
const probe = document.body.appendChild(el("span", { class: "unseen", "aria-hidden": "true" }));
function colour(name) {
  if (!colourCache.has(name)) {
    probe.style.color = `var(--${name})`;
    colourCache.set(name, getComputedStyle(probe).color);
  }
  return colourCache.get(name);
}
const runColour = (index) => colour(`series-${index % SERIES}`);
const runDash = (index) => DASHES[index % DASHES.length];

function channels(text) {
  return text.match(/[\d.]+/g).slice(0, 3).map(Number);
}

function mix(from, to, share) {
  const [a, b] = [channels(from), channels(to)];
  return `rgb(${a.map((value, index) => Math.round(value + (b[index] - value) * share)).join(" ")})`;
}

function faded(text, alpha) {
  return `rgb(${channels(text).join(" ")} / ${alpha})`;
}

// The theme is the system's until chosen; the choice lives as long as the page.
const THEMES = ["auto", "light", "dark"];
let theme = "auto";
const themeListeners = [];

function setTheme(name) {
  theme = name;
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  const button = byId("theme");
  fill(button, el("span", { "aria-hidden": "true" }, "◐ "), el("span", { class: "wordy" }, "Theme: "), name);
  button.setAttribute("aria-label", `Theme: ${name}. Change it`);
  themeChanged();
}

function themeChanged() {
  colourCache.clear();
  for (const listener of themeListeners) listener();
}

function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
  announce(`Theme: ${theme}`);
}

function announce(text) {
  byId("live").textContent = text;
}

// A table; columns are [heading, "number" | "wrap" | ""], cells are text or elements, the first of a row is its heading.
function table(columns, rows, { caption = null, tall = false, label = "Table" } = {}) {
  const head = el("tr", {}, columns.map(([heading, kind]) => el("th", { scope: "col", class: kind }, heading)));
  const body = rows.map((cells) =>
    el("tr", {}, cells.map((cell, index) => el(index ? "td" : "th", { class: columns[index][1] || null, scope: index ? null : "row" }, cell ?? ""))),
  );
  const node = el("table", {}, caption && el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, body));
  return el("div", { class: tall ? "scroll tall" : "scroll", tabindex: "0", role: "region", "aria-label": caption || label }, node);
}

function control(label, input) {
  return el("label", {}, label, input);
}

function picker(label, options, value, onchange) {
  const node = el("select", { onchange: () => onchange(node.value) }, options.map(([key, text]) => el("option", { value: key }, text)));
  node.value = value;
  return control(label, node);
}

function radios(legend, name, options, value, onchange) {
  const inputs = options.map(([key, text]) =>
    el("label", {}, el("input", { type: "radio", name, value: key, checked: key === value, onchange: () => onchange(key) }), text),
  );
  return el("fieldset", { class: "choice" }, el("legend", {}, legend), inputs);
}

function legend(labels, shape) {
  return el("ul", { class: "legend" }, labels.map((label, index) => el("li", {}, shape(index), label)));
}

function lineSwatch(index) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "dash");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(svg.namespaceURI, "line");
  for (const [name, value] of Object.entries({ x1: 0, x2: 26, y1: 5, y2: 5, "stroke-width": 2.5, "stroke-dasharray": runDash(index).join(" ") })) line.setAttribute(name, value);
  line.style.stroke = `var(--series-${index % SERIES})`;
  svg.append(line);
  return svg;
}

function boxSwatch(index) {
  const node = el("span", { class: "swatch", "aria-hidden": "true" });
  node.style.background = `var(--series-${index % SERIES})`;
  return node;
}

const sections = []; // {id, title, node}
function addSection(id, title, ...children) {
  const node = el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title`, tabindex: "-1" }, title), children);
  byId("main").append(node);
  sections.push({ id, title, node });
  return node;
}

function stagesOf(list) {
  return [...new Set(list.flatMap((run) => run.stages.map((stage) => stage.name)))];
}

// The stage that people look at first: RL if there is one, else the last.
function mainStage() {
  const names = stagesOf(runs);
  return names.includes("rl") ? "rl" : (names.at(-1) ?? "");
}
