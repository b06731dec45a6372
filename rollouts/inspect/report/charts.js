// Charts on canvases: drawn when they come into view, hovered by pointer and by arrow keys.
const chartOf = new WeakMap();
const visible = new Set();
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) visible.add(target);
    else visible.delete(target);
    if (isIntersecting) drawChart(chartOf.get(target));
  }
}, { rootMargin: "200px" });
const sized = new ResizeObserver((entries) => entries.forEach(({ target }) => visible.has(target) && drawChart(chartOf.get(target))));
themeListeners.push(() => visible.forEach((canvas) => drawChart(chartOf.get(canvas))));

const LEFT = 50, RIGHT = 10, TOP = 8, BOTTOM = 22;

// chart: title, note, height, paint(context, chart), at(x, y, chart) → place or null, step(place, dx, dy, chart) → place, describe(place, chart) → text, summary
function addChart(chart) {
  chart.place = null;
  chart.canvas = el("canvas", {
    tabindex: "0", role: "img", "aria-label": `${chart.title}. ${chart.summary} Arrow keys read values.`,
    onpointermove: (event) => hoverChart(chart, chart.at(event.offsetX, event.offsetY, chart), event.clientX, event.clientY),
    onpointerleave: () => hoverChart(chart, null),
    onblur: () => hoverChart(chart, null),
    onkeydown: (event) => chartKey(chart, event),
  });
  chart.canvas.style.height = `${chart.height}px`;
  chartOf.set(chart.canvas, chart);
  seen.observe(chart.canvas);
  sized.observe(chart.canvas);
  return el("figure", {}, el("figcaption", {}, el("span", {}, chart.title), el("span", { class: "last" }, chart.note ?? "")), chart.canvas);
}

function drawChart(chart) {
  const { canvas } = chart;
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width || !height) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.font = "11px system-ui, sans-serif";
  chart.box = { left: LEFT, right: width - RIGHT, top: TOP, bottom: height - BOTTOM };
  chart.paint(context, chart);
}

function hoverChart(chart, place, clientX, clientY) {
  const same = JSON.stringify(place) === JSON.stringify(chart.place);
  chart.place = place;
  if (!same) drawChart(chart);
  const tip = byId("tip");
  tip.classList.toggle("hidden", place === null);
  if (place === null) return;
  tip.textContent = chart.describe(place, chart);
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(clientX + 14, innerWidth - width - 4))}px`;
  tip.style.top = `${clientY + 18 + height > innerHeight ? Math.max(4, clientY - height - 10) : clientY + 18}px`;
}

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
function chartKey(chart, event) {
  if (event.key === "Escape") hoverChart(chart, null);
  const move = MOVES[event.key];
  if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
  if (!chart.box) drawChart(chart);
  const next = chart.step(chart.place, move[0] * (event.shiftKey ? 10 : 1), move[1], chart);
  if (next === null) return;
  event.preventDefault();
  const { left, top } = chart.canvas.getBoundingClientRect();
  hoverChart(chart, next, left + (chart.pixel?.(next, chart) ?? LEFT), top + TOP + 20);
  announce(chart.describe(next, chart));
}

// 1, 2 or 5 times a power of ten, of which about `wanted` fit the range.
function ticks(low, high, wanted) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw * 0.999);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  return found;
}

function logTicks(low, high) {
  const found = [];
  const factors = high / low < 100 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
    for (const factor of factors) if (factor * 10 ** power >= low * 0.999 && factor * 10 ** power <= high * 1.001) found.push(factor * 10 ** power);
  return found.length > 8 ? found.filter((_, index) => index % Math.ceil(found.length / 6) === 0) : found;
}

function tickText(value) {
  const size = Math.abs(value);
  if (size >= 1e4) return `${Number((value / (size >= 1e9 ? 1e9 : size >= 1e6 ? 1e6 : 1e3)).toPrecision(3))}${size >= 1e9 ? "G" : size >= 1e6 ? "M" : "k"}`;
  if (size && size < 1e-3) return value.toExponential(0);
  return String(Number(value.toPrecision(4)));
}

// Scales of a box: pixels of x and y.
function scales(box, x, y, log) {
  const of = log ? Math.log : (value) => value;
  const [yLow, yHigh] = [of(y[0]), of(y[1])];
  return {
    x: (value) => box.left + ((value - x[0]) / (x[1] - x[0] || 1)) * (box.right - box.left),
    y: (value) => box.bottom - ((of(value) - yLow) / (yHigh - yLow || 1)) * (box.bottom - box.top),
  };
}

function paintAxes(context, { box }, x, y, scale, { log = false, xText = tickText } = {}) {
  context.strokeStyle = colour("grid");
  context.fillStyle = colour("soft");
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of log ? logTicks(...y) : ticks(...y, 5)) {
    const at = Math.round(scale.y(value)) + 0.5;
    strokeLine(context, box.left, at, box.right, at);
    context.fillText(tickText(value), box.left - 6, at);
  }
  context.textBaseline = "top";
  const shown = ticks(...x, Math.max(3, (box.right - box.left) / 80));
  for (const value of shown) {
    const at = scale.x(value);
    context.textAlign = at > box.right - 12 ? "right" : at < box.left + 12 ? "left" : "center";
    strokeLine(context, at, box.bottom, at, box.bottom + 4);
    context.fillText(xText(value), at, box.bottom + 7);
  }
}

function strokeLine(context, x1, y1, x2, y2) {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

// The index whose x is nearest, of ascending numbers.
function nearest(xs, x) {
  let [low, high] = [0, xs.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

function extent(lists) {
  let [low, high] = [Infinity, -Infinity];
  for (const list of lists) for (const value of list) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low > high ? null : [low, high];
}

// A heat map: columns of shares that sum to 1 over their rows.
function heatChart({ title, note, height, columns, edges, counts, means, columnText, binText, summary }) {
  const totals = counts.map((column) => column.reduce((sum, value) => sum + value, 0));
  const most = Math.max(1e-9, ...counts.map((column, index) => Math.max(...column) / (totals[index] || 1)));
  const bins = edges.length - 1;
  const place = (x, y, { box }) => {
    const column = Math.floor(((x - box.left) / (box.right - box.left)) * columns.length);
    const bin = Math.floor(((box.bottom - y) / (box.bottom - box.top)) * bins);
    return column < 0 || bin < 0 || column >= columns.length || bin >= bins ? null : { column, bin };
  };
  const heat = (share) => {
    const at = Math.sqrt(share / most) * 3;
    const from = Math.min(2, Math.floor(at));
    return mix(colour(`heat-${from}`), colour(`heat-${from + 1}`), at - from);
  };
  return addChart({
    title, note, height, summary, at: place,
    step: (old, dx, dy) => ({
      column: Math.max(0, Math.min(columns.length - 1, (old?.column ?? (dx > 0 ? -1 : columns.length)) + dx)),
      bin: Math.max(0, Math.min(bins - 1, (old?.bin ?? 0) + dy)),
    }),
    pixel: (at, { box }) => box.left + ((at.column + 0.5) / columns.length) * (box.right - box.left),
    describe: ({ column, bin }) =>
      `${columnText(columns[column])}\n${binText(bin)}: ${count(counts[column][bin])} of ${count(totals[column])} (${percent(counts[column][bin] / (totals[column] || 1))})\nmean ${number(means[column])}`,
    paint(context, chart) {
      const { box } = chart;
      const [width, tall] = [(box.right - box.left) / columns.length, (box.bottom - box.top) / bins];
      counts.forEach((column, c) => column.forEach((value, b) => {
        if (!value) return;
        context.fillStyle = heat(value / totals[c]);
        const [x, y] = [Math.round(box.left + c * width), Math.round(box.bottom - (b + 1) * tall)];
        context.fillRect(x, y, Math.round(box.left + (c + 1) * width) - x, Math.round(box.bottom - b * tall) - y);
      }));
      const range = [edges[0], edges[bins]];
      const scale = scales(box, [0, columns.length], range, false);
      context.textBaseline = "middle";
      context.textAlign = "right";
      context.fillStyle = colour("soft");
      context.strokeStyle = colour("line");
      context.strokeRect(box.left + 0.5, box.top + 0.5, box.right - box.left - 1, box.bottom - box.top - 1);
      for (const value of ticks(...range, 4)) context.fillText(tickText(value), box.left - 6, scale.y(value));
      context.textBaseline = "top";
      const every = Math.max(1, Math.ceil(columns.length / ((box.right - box.left) / 70)));
      columns.forEach((column, c) => {
        if (c % every) return;
        const at = scale.x(c + 0.5);
        context.textAlign = at > box.right - 20 ? "right" : "center";
        context.fillText(tickText(column[0]), at, box.bottom + 7);
      });
      paintMeans(context, means, scale);
      if (chart.place) {
        context.strokeStyle = colour("bad");
        context.lineWidth = 2;
        context.strokeRect(box.left + chart.place.column * width, box.bottom - (chart.place.bin + 1) * tall, width, tall);
      }
    },
  });
}

function paintMeans(context, means, scale) {
  for (const [style, width] of [[colour("card"), 5], [colour("bad"), 2]]) {
    context.strokeStyle = style;
    context.lineWidth = width;
    context.beginPath();
    means.forEach((mean, column) => mean !== null && context.lineTo(scale.x(column + 0.5), scale.y(mean)));
    context.stroke();
  }
}
