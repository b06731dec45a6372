// One sample: its messages, rewards and tokens.
const COLOURINGS = [["plain", "text"], ["advantage", "advantage"], ["logprob_diff", "log-prob difference"], ["mask", "trained tokens"]];

function fillDetail() {
  const sample = browse.shown[browse.at];
  if (!sample) return fill(parts.detail, el("p", { class: "soft" }, "No sample is like that; take a filter away."));
  const tokens = sample.arrays;
  const colourings = tokens ? COLOURINGS.filter(([name]) => name === "plain" || name in tokens) : [];
  const name = colourings.some(([key]) => key === browse.colouring) ? browse.colouring : "plain";
  const colouringHadFocus = document.activeElement?.name === "colouring";
  fill(parts.detail,
    el("h3", {}, sample.id ?? "sample", el("span", { class: "soft small" }, `  ${browse.at + 1} of ${count(browse.shown.length)}`)),
    sampleFacts(sample),
    rewardTable(sample),
    failureBlock(sample),
    colourings.length > 1 && el("div", { class: "controls" }, radios("Show", "colouring", colourings, name, (colouring) => { browse.colouring = colouring; fillDetail(); }), scaleOf(tokens, name)),
    name === "plain" ? messages(sample) : el("div", { class: "message response" }, el("h4", {}, "prompt and response by token"), tokenText(tokens, name)),
    sample.metadata && el("details", {}, el("summary", {}, "Metadata"), el("pre", { class: "json" }, marked(JSON.stringify(withoutFailure(sample.metadata), null, 2)))),
  );
  if (colouringHadFocus) parts.detail.querySelector("input[name=colouring]:checked")?.focus({ preventScroll: true });
}

function sampleFacts(sample) {
  const versions = sample.weight_version_min === undefined ? null : sample.weight_version_min === sample.weight_version_max ? String(sample.weight_version_min) : `${sample.weight_version_min} to ${sample.weight_version_max}`;
  const siblings = sample.group_index === undefined ? [] : sampleRows[browse.run].filter((other) => other.stage === sample.stage && other.group_index === sample.group_index);
  const played = sample.trajectory;
  const facts = [
    ["stage", `${sample.stage}, step ${count(sample.step)}`],
    ["status", el("span", { class: sample.status === "failed" ? "bad" : null }, sample.status ?? "–")],
    ["reward", el("b", {}, number(sample.reward))],
    ["tokens", `${count(sample.response_length ?? 0)} of the response, ${count(sample.tokens ?? 0)} in all`],
    versions && ["weights", `version ${versions}, trained from version ${sample.policy_version}`],
    sample.share !== undefined && ["gradient", `advantage ${number(sample.advantage)}, share ${percent(sample.share)}, weight ${number(sample.weight)}`],
    played && ["trajectory", endOf(played)],
    siblings.length > 1 && ["group", el("button", { type: "button", class: "plain", onclick: () => changeBrowse({ step: "all", status: "all", group: sample.group_index }) }, `${sample.group_index}: show its ${siblings.length} samples`)],
  ].filter(Boolean);
  return el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

// How a trajectory ended and what became of it.
function endOf({ end, turns, tool_calls: calls, tool_s: waited, s: all, restarts, resumed, trains }) {
  return [
    `ended: ${end}`, plural(turns.length, "turn", "turns"), plural(calls, "tool call", "tool calls"), `${duration(waited)} of ${duration(all)} waiting`,
    restarts && `restarts ${restarts}`, resumed && `resumed ${resumed}`, !trains && "does not train",
  ].filter(Boolean).join(" · ");
}

function rewardTable(sample) {
  const rows = Object.entries(sample.rewards ?? {}).map(([name, value]) => [name, number(value)]);
  return rows.length ? table([["part of the reward", ""], ["value", "number"]], rows, { label: "Parts of the reward" }) : null;
}

function withoutFailure(metadata) {
  return Object.fromEntries(Object.entries(metadata).filter(([name]) => name !== "failure"));
}

function failureBlock(sample) {
  const failure = sample.metadata?.failure;
  if (!failure || typeof failure !== "object") return null;
  return el("div", { class: "message failure" },
    el("h4", {}, ["failed", failure.class, failure.function].filter(Boolean).join(" · ")),
    el("p", { class: "text" }, marked(String(failure.message ?? ""))),
    failure.traceback && el("details", {}, el("summary", {}, "Traceback"), el("pre", { class: "json" }, String(failure.traceback))));
}

function messages(sample) {
  if (sample.turns) return sample.turns.map(conversationTurn);
  const turns = typeof sample.prompt === "string" ? [{ role: "prompt", content: sample.prompt }] : (sample.prompt ?? []);
  return [
    ...turns.map((turn) => el("div", { class: "message" }, el("h4", {}, turn.role ?? "message"), el("div", { class: "text" }, marked(messageText(turn.content))))),
    el("div", { class: "message response" }, el("h4", {}, "response"), el("div", { class: "text" }, marked(sample.response || "(empty)"))),
  ];
}

// What a message says, or a line between messages; those of the model have the numbers of their turn.
function conversationTurn({ said, text }) {
  if (!said) return el("p", { class: "soft small" }, text);
  const ofModel = said.includes(" · turn ");
  return el("div", { class: ofModel ? "message response" : "message" }, el("h4", {}, said.slice(1, -2)), el("div", { class: "text" }, marked(text || "(empty)")));
}

// Text with what is searched for marked.
function marked(text) {
  const needle = browse.text.toLowerCase();
  if (!needle) return [text];
  const lower = text.toLowerCase();
  if (lower.length !== text.length) return [text]; // a few letters change their length: places would not fit
  const found = [];
  let from = 0;
  for (let at = lower.indexOf(needle); at >= 0; at = lower.indexOf(needle, from)) {
    found.push(text.slice(from, at), el("mark", {}, text.slice(at, at + needle.length)));
    from = at + needle.length;
  }
  return [...found, text.slice(from)];
}

// The value that has the full colour: the 98th percentile of sizes, so that one token does not pale the rest. Differences below a thousandth
// of a nat are rounding and stay pale.
function fullScale(tokens, name) {
  const sizes = tokens[name].filter((value, index) => value !== null && tokens.mask[index] === 1).map(Math.abs).sort((a, b) => a - b);
  const size = sizes[Math.ceil(sizes.length * 0.98) - 1] || 1;
  return name === "logprob_diff" ? Math.max(size, 1e-3) : size;
}

function tint(value, full) {
  const share = Math.max(-1, Math.min(1, value / full));
  return `rgb(${share < 0 ? "213 94 0" : "0 114 178"} / ${Math.round(Math.abs(share) * 42) / 100})`;
}

function tokenText(tokens, name) {
  const full = name === "mask" ? 1 : fullScale(tokens, name);
  const node = el("div", { class: "text tokens" });
  tokens.pieces.forEach((piece, index) => {
    const trained = tokens.mask[index] === 1;
    const span = el("span", { class: trained ? (name === "mask" ? "on" : null) : "off", title: tokenTitle(tokens, index) }, piece);
    if (trained && name !== "mask" && tokens[name][index] !== null) span.style.backgroundColor = tint(tokens[name][index], full);
    node.append(span);
  });
  if (tokens.cut) node.append(el("span", { class: "soft" }, ` … ${count(tokens.cut)} more tokens`));
  return node;
}

function tokenTitle(tokens, index) {
  if (tokens.mask[index] !== 1) return "not trained";
  const said = COLOURINGS.slice(1, 3).filter(([name]) => name in tokens).map(([name, label]) => `${label} ${number(tokens[name][index])}`);
  return said.join(", ");
}

function scaleOf(tokens, name) {
  if (name === "plain") return null;
  if (name === "mask") return el("span", { class: "scale" }, "underlined: trained");
  const full = fullScale(tokens, name);
  const bar = el("canvas", { width: "160", height: "12", "aria-hidden": "true" });
  const context = bar.getContext("2d");
  for (let x = 0; x < 160; x += 1) {
    context.fillStyle = tint((x / 159) * 2 - 1, 1);
    context.fillRect(x, 0, 1, 12);
  }
  const what = name === "logprob_diff" ? ": trainer − engine, nats" : "";
  return el("span", { class: "scale" }, number(-full), bar, `${number(full)}${what}`);
}
