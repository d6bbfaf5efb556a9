"use strict";
// What vime/report/samples.py wrote. columns: one list per field, one entry per sample; status, prompt: numbers of
// statuses and prompts. tokens, log_probs: base64 of little-endian uint32 and uint16, response tokens of all samples one
// after the other; a token is a number of token_texts and token_ids, a log-prob is in steps of -0.001 nats.
const data = JSON.parse(document.getElementById("data").textContent);
const columns = data.columns;
const count = columns.group_id.length;
const hasRollouts = data.rollouts.length > 1;
const PAGE_ROWS = 50;

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
const tokens = new Uint32Array(bytes(data.tokens));
const logProbs = new Uint16Array(bytes(data.log_probs));
const offsets = new Array(count + 1).fill(0);
for (let i = 0; i < count; i++) offsets[i + 1] = offsets[i] + columns.response_len[i];

const $ = (id) => document.getElementById(id);
function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
const number = (value) =>
  value === null || value === undefined ? "-" : typeof value !== "number" ? String(value)
    : Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
const flat = (text) => text.replace(/\s*\n\s*/g, " ⏎ ");
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

// ---------------------------------------------------------------- what a sample is called and says
const nameOf = (i) => `${columns.group_id[i]}/${columns.index[i]}`;
const keyOf = (i) => (hasRollouts ? `${columns.rollout_id[i]}:${nameOf(i)}` : nameOf(i));
const promptOf = (i) => data.prompts[columns.prompt[i]];
const statusOf = (i) => data.statuses[columns.status[i]];
let searchable = null;
function searchText(i) {
  if (!searchable) searchable = new Array(count);
  searchable[i] ??= [promptOf(i), columns.text[i], columns.label[i] ?? "", columns.metadata[i], nameOf(i)].join("\n").toLowerCase();
  return searchable[i];
}
// A chat template starts and ends every prompt alike, which says nothing in a table. Cut at its marks and lines alone.
function sharedBy(texts, at) {
  if (texts.length < 2) return 0;
  let n = texts[0].length;
  for (const text of texts) {
    let k = 0;
    while (k < n && k < text.length && at(text, k) === at(texts[0], k)) k++;
    n = k;
  }
  return n;
}
const first = data.prompts[0] ?? "";
const sharedHead = first.slice(0, sharedBy(data.prompts, (text, k) => text[k]));
const head = Math.max(sharedHead.lastIndexOf("\n"), sharedHead.lastIndexOf(">")) + 1;
const sharedTail = first.slice(first.length - sharedBy(data.prompts, (text, k) => text[text.length - 1 - k]));
const mark = sharedTail.search(/[<\n]/);
const tail = mark < 0 ? 0 : sharedTail.length - mark;
function promptEnd(i) {
  const prompt = promptOf(i);
  const text = flat(prompt.slice(head, Math.max(head, prompt.length - tail))).trim();
  return text.length > 120 ? "…" + text.slice(-119) : text;
}

const SHOWN = [
  ...(hasRollouts ? [["rollout", "rollout", (i) => columns.rollout_id[i], true]] : []),
  ["sample", "sample", (i) => columns.group_id[i] * 1e6 + columns.index[i], false],
  ["status", "status", statusOf, false],
  ["reward", "reward", (i) => columns.reward[i], true],
  ["prompt_len", "prompt_len", (i) => columns.prompt_len[i], true],
  ["response_len", "response_len", (i) => columns.response_len[i], true],
  ["mean_log_prob", "mean_log_prob", (i) => columns.mean_log_prob[i], true],
  ["prompt", "prompt", promptEnd, false],
  ["response", "response", (i) => columns.text[i], false],
];

// ---------------------------------------------------------------- the view, kept in the address
const form = $("filters");
const FILTERS = ["q", "status", "rollout", "rmin", "rmax", "lmin", "lmax"];
let view = {};
function readAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  view = { sort: asked.get("sort") ?? "", page: Math.max(1, parseInt(asked.get("page"), 10) || 1), open: asked.get("open") ?? "" };
  for (const name of FILTERS) view[name] = asked.get(name) ?? "";
}
function writeAddress(isNew) {
  const kept = new URLSearchParams();
  for (const name of [...FILTERS, "sort", "page", "open"])
    if (view[name] && !(name === "page" && view.page === 1)) kept.set(name, view[name]);
  const hash = "#" + kept.toString().replaceAll("%2F", "/").replaceAll("%3A", ":");
  history[isNew ? "pushState" : "replaceState"](null, "", hash);
}
function change(what, isNew = false) {
  view = { ...view, ...what };
  writeAddress(isNew);
  show();
}

// ---------------------------------------------------------------- filter and sort
const bound = (text) => (text.trim() === "" || Number.isNaN(Number(text)) ? null : Number(text));
const inside = (value, low, high) =>
  (low === null && high === null) || (typeof value === "number" && (low === null || value >= low) && (high === null || value <= high));
function matching() {
  const query = view.q.trim().toLowerCase();
  const [rmin, rmax, lmin, lmax] = [view.rmin, view.rmax, view.lmin, view.lmax].map(bound);
  const found = [];
  for (let i = 0; i < count; i++) {
    if (view.status && statusOf(i) !== view.status) continue;
    if (view.rollout && String(columns.rollout_id[i]) !== view.rollout) continue;
    if (!inside(columns.reward[i], rmin, rmax) || !inside(columns.response_len[i], lmin, lmax)) continue;
    if (query && !searchText(i).includes(query)) continue;
    found.push(i);
  }
  return sorted(found);
}
function sorted(found) {
  const isDown = view.sort.startsWith("-");
  const column = SHOWN.find(([name]) => name === view.sort.replace("-", ""));
  if (!column) return found;
  const keys = new Map(found.map((i) => [i, column[2](i)]));
  const isNone = (key) => key === null || key === undefined;
  return found.sort((a, b) => {
    const [x, y] = [keys.get(a), keys.get(b)];
    if (isNone(x) || isNone(y)) return isNone(x) - isNone(y) || a - b;  // without a value: last, either way
    const order = x < y ? -1 : x > y ? 1 : 0;
    return (isDown ? -order : order) || a - b;
  });
}

// ---------------------------------------------------------------- draw
let found = [];
function show() {
  found = matching();
  const numPages = Math.max(1, Math.ceil(found.length / PAGE_ROWS));
  view.page = Math.min(view.page, numPages);
  for (const name of FILTERS) if (form.elements[name].value !== view[name]) form.elements[name].value = view[name];
  showNumbers();
  showHistogram();
  showTable();
  $("count").textContent = found.length === count ? `${count} samples` : `${found.length} of ${count} samples`;
  $("pages").hidden = numPages === 1;
  $("page").textContent = `page ${view.page} of ${numPages}`;
  $("previous").disabled = view.page === 1;
  $("next").disabled = view.page === numPages;
  showSample();
}
function showNumbers() {
  const rewards = found.map((i) => columns.reward[i]).filter((r) => typeof r === "number");
  const lengths = found.map((i) => columns.response_len[i]).sort((a, b) => a - b);
  const share = (status) => found.filter((i) => statusOf(i) === status).length / found.length;
  const facts = [
    ["mean reward", rewards.length ? number(mean(rewards)) : "-"],
    ["truncated", found.length ? `${(100 * share("truncated")).toFixed(1)} %` : "-"],
    ["mean log-prob, nats", number(mean(found.map((i) => columns.mean_log_prob[i]).filter((v) => v !== null)))],
    ["mean response, tokens", number(mean(lengths))],
    ["median response", number(lengths.length ? lengths[Math.floor((lengths.length - 1) / 2)] : null)],
    ["longest response", number(lengths.length ? lengths[lengths.length - 1] : null)],
  ];
  $("numbers").replaceChildren(...facts.map(([name, value]) => {
    const box = element("div");
    box.append(element("dt", name), element("dd", value));
    return box;
  }));
}
function rewardBins() {
  const rewards = columns.reward.filter((r) => typeof r === "number");
  const distinct = [...new Set(rewards)].sort((a, b) => a - b);
  if (distinct.length <= 12) return distinct.map((r) => [r, r]);
  const [low, high] = [distinct[0], distinct[distinct.length - 1]];
  return Array.from({ length: 20 }, (_, k) => [low + (k * (high - low)) / 20, k === 19 ? high : low + ((k + 1) * (high - low)) / 20]);
}
const bins = rewardBins();
function binOf(reward) {
  const k = bins.findIndex(([, high], at) => reward < high || (at === bins.length - 1 || bins[0][0] === bins[0][1]) && reward <= high);
  return k;
}
const binOfSample = columns.reward.map((r) => (typeof r === "number" ? binOf(r) : -1));
function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function showHistogram() {
  const tally = (which) => which.reduce((sums, i) => { if (binOfSample[i] >= 0) sums[binOfSample[i]]++; return sums; }, bins.map(() => 0));
  const all = tally([...binOfSample.keys()]);
  const shown = tally(found);
  const [width, height, top] = [320 / Math.max(bins.length, 1), 78, 14];
  const scale = height / Math.max(...all, 1);
  const bars = bins.map(([low, high], k) => {
    const [x, w] = [k * width + width * 0.08, Math.min(width * 0.84, 60)];
    const range = low === high ? number(low) : `${number(low)} to ${number(high)}`;
    const group = svg("g", { role: "button", tabindex: 0, "aria-label": `reward ${range}: ${shown[k]} of ${all[k]} samples` });
    group.append(svg("title", {}, `reward ${range}: ${shown[k]} of ${all[k]} samples`));
    group.append(svg("rect", { class: "all", x, width: w, y: top + height - all[k] * scale, height: all[k] * scale }));
    group.append(svg("rect", { class: "shown", x, width: w, y: top + height - shown[k] * scale, height: shown[k] * scale }));
    if (bins.length <= 12) {
      group.append(svg("text", { x: x + w / 2, y: 104, "text-anchor": "middle" }, number(low)));
      group.append(svg("text", { x: x + w / 2, y: top + height - all[k] * scale - 3, "text-anchor": "middle" }, all[k]));
    }
    group.append(svg("rect", { class: "hit", x: k * width, width, y: 0, height: top + height }));
    const choose = () => {
      const isChosen = view.rmin === String(low) && view.rmax === String(high);
      change({ rmin: isChosen ? "" : String(low), rmax: isChosen ? "" : String(high), page: 1 });
    };
    group.addEventListener("click", choose);
    group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } });
    return group;
  });
  if (bins.length > 12) {
    bars.push(svg("text", { x: 0, y: 104 }, number(bins[0][0])));
    bars.push(svg("text", { x: 320, y: 104, "text-anchor": "end" }, number(bins[bins.length - 1][1])));
  }
  if (!bins.length) bars.push(svg("text", { x: 0, y: 60 }, "no rewards"));
  const focused = [...$("histogram").children].indexOf(document.activeElement);
  $("histogram").replaceChildren(...bars);
  if (focused >= 0) bars[focused].focus();
}
function showTable() {
  for (const head of $("table").tHead.rows[0].cells) {
    const name = head.dataset.name;
    const order = view.sort === name ? "ascending" : view.sort === "-" + name ? "descending" : "none";
    head.setAttribute("aria-sort", order);
  }
  const start = (view.page - 1) * PAGE_ROWS;
  const rows = found.slice(start, start + PAGE_ROWS).map((i) => {
    const row = element("tr");
    row.dataset.key = keyOf(i);
    for (const [name, , value, isNumber] of SHOWN) {
      const cell = element("td", undefined, `c-${name}${isNumber ? " number" : ""}`);
      if (name === "sample") {
        const link = element("a", nameOf(i));
        link.href = "#open=" + keyOf(i);
        cell.append(link);
      } else if (name === "prompt") cell.append(element("bdi", promptEnd(i)));
      else if (name === "response") cell.textContent = flat(columns.text[i].slice(0, 300));
      else cell.textContent = isNumber ? number(value(i)) : value(i);
      if (name === "status") cell.classList.add("is-" + statusOf(i));
      row.append(cell);
    }
    return row;
  });
  $("table").tBodies[0].replaceChildren(...rows);
}

// ---------------------------------------------------------------- one sample
const probability = (code) => Math.exp(-code / 1000);
function bandOf(code) {
  if (code === data.codes.not_sampled) return "masked";
  const p = code === data.codes.not_finite ? 0 : probability(code);
  const k = data.bands.findIndex((band, at) => p > band.above || at === data.bands.length - 1);
  return "b" + k;
}
function logProbText(code) {
  if (code === data.codes.not_sampled) return data.masked;
  if (code === data.codes.not_finite) return "log-prob is not a finite number";
  return `log-prob ${nats(code)} nats, p ${number(probability(code))}`;
}
const nats = (code) => (code === data.codes.lowest ? "≤ " : "") + (-code / 1000).toFixed(3);
let shownKey = null;
function showSample() {
  const dialog = $("sample");
  const i = view.open ? [...columns.group_id.keys()].find((k) => keyOf(k) === view.open || nameOf(k) === view.open) : undefined;
  if (i === undefined) {
    shownKey = null;
    if (dialog.open) dialog.close();
    return;
  }
  const at = found.indexOf(i);
  $("sample-previous").disabled = at <= 0;
  $("sample-next").disabled = at < 0 || at === found.length - 1;
  if (shownKey !== keyOf(i)) fillSample(i);
  shownKey = keyOf(i);
  if (!dialog.open) dialog.showModal();
}
function fillSample(i) {
  $("sample-name").textContent = `Sample ${nameOf(i)}` + (hasRollouts ? `, rollout ${columns.rollout_id[i]}` : "");
  const facts = [
    ["status", statusOf(i)], ["reward", number(columns.reward[i])], ["label", columns.label[i]],
    ["length", `${columns.prompt_len[i]} prompt + ${columns.response_len[i]} response tokens`],
    ["mean log-prob", columns.mean_log_prob[i] === null ? "-" : `${number(columns.mean_log_prob[i])} nats`],
    ["weight version", columns.weight_version[i]], ["seed", columns.seed[i]], ["metadata", columns.metadata[i]],
  ].filter(([, value]) => value !== null && value !== "");
  $("facts").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
  $("prompt").textContent = promptOf(i);
  $("text").textContent = columns.text[i];
  $("token").textContent = "Point at a token, or touch it." + (data.token_problem ? ` Ids instead of texts: ${data.token_problem}.` : "");
  const strip = [];
  for (let t = offsets[i]; t < offsets[i + 1]; t++) {
    const span = element("span", data.token_texts[tokens[t]].replace(/\n/g, "⏎\n"), bandOf(logProbs[t]));
    span.dataset.t = t;
    strip.push(span);
  }
  $("strip").replaceChildren(...strip);
  fillLeastLikely(i);
  $("sample").scrollTop = 0;
}
function fillLeastLikely(i) {
  const sampled = [];
  for (let t = offsets[i]; t < offsets[i + 1]; t++) if (logProbs[t] !== data.codes.not_sampled) sampled.push(t);
  sampled.sort((a, b) => logProbs[b] - logProbs[a] || a - b);
  $("least").tBodies[0].replaceChildren(...sampled.slice(0, 10).map((t) => {
    const row = element("tr");
    const isFinite = logProbs[t] !== data.codes.not_finite;
    row.append(element("td", t - offsets[i], "number"), element("td", data.token_ids[tokens[t]], "number"));
    row.append(element("td", JSON.stringify(data.token_texts[tokens[t]])));
    row.append(element("td", isFinite ? nats(logProbs[t]) : "none", "number"));
    row.append(element("td", isFinite ? number(probability(logProbs[t])) : "-", "number"));
    return row;
  }));
}
function pointAt(event) {
  const span = event.target.closest("#strip span");
  if (!span) return;
  document.querySelector("#strip .is-pointed")?.classList.remove("is-pointed");
  span.classList.add("is-pointed");
  const t = Number(span.dataset.t);
  const i = offsets.findLastIndex((start) => start <= t);
  $("token").textContent = `response token ${t - offsets[i]}, id ${data.token_ids[tokens[t]]}, ${JSON.stringify(data.token_texts[tokens[t]])}: ${logProbText(logProbs[t])}`;
}
function step(by) {
  const at = found.findIndex((i) => keyOf(i) === shownKey);
  const next = found[at + by];
  if (at >= 0 && next !== undefined) change({ open: keyOf(next), page: Math.floor((at + by) / PAGE_ROWS) + 1 });
}

// ---------------------------------------------------------------- once
function rows(title, facts) {
  const table = element("table");
  const body = element("tbody");
  for (const [name, value] of facts) {
    const row = element("tr");
    row.append(element("td", name), element("td", typeof value === "object" && value !== null ? JSON.stringify(value) : number(value)));
    body.append(row);
  }
  table.append(body);
  const section = element("section");
  section.append(element("h3", title), table);
  return section;
}
function showHeaders() {
  for (const rollout of data.rollouts) {
    const name = hasRollouts ? `Rollout ${rollout.rollout_id}: ` : "";
    const { sampling = {}, sampling_origin: origin = {}, model = {}, library_versions: versions = {}, counts = {}, ...rest } = rollout.header;
    const options = Object.entries(sampling).map(([key, value]) => [key, `${JSON.stringify(value)}${origin[key] ? ` (${origin[key]})` : ""}`]);
    const record = [...Object.entries(model).map(([k, v]) => ["model " + k.replaceAll("_", " "), v]), ...Object.entries(rest), ...Object.entries(counts)];
    $("header-tables").append(rows(name + "record", [...record, ["versions", Object.entries(versions).map((v) => v.join(" ")).join(", ")]]));
    if (options.length) $("header-tables").append(rows(name + "sampling", options));
    $("header-tables").append(rows(name + "statistics of all its samples", Object.entries(rollout.statistics)));
  }
}
function build() {
  document.querySelector("h1").textContent = data.title ? data.title.replace(/.*\//, "") : "Samples";
  const ids = data.rollouts.map((r) => r.rollout_id);
  const model = data.rollouts[0]?.header.model?.path;
  const total = data.rollouts.reduce((sum, r) => sum + r.num_samples, 0);
  $("about").textContent = [hasRollouts ? `rollouts ${ids.join(", ")}` : ids.length ? `rollout ${ids[0]}` : "", model,
    total === count ? `${count} samples` : `${count} of ${total} samples (chosen with --where)`].filter(Boolean).join(" · ");
  for (const status of data.statuses) form.elements.status.append(element("option", status));
  for (const id of ids) form.elements.rollout.append(element("option", id));
  $("rollout-filter").hidden = !hasRollouts;
  for (const [name, title, , isNumber] of SHOWN) {
    const head = element("th", undefined, `c-${name}${isNumber ? " number" : ""}`);
    head.dataset.name = name;
    const button = element("button");
    title.split(/(?<=_)/).forEach((part) => button.append(part, element("wbr")));
    button.type = "button";
    button.addEventListener("click", () => change({ sort: view.sort === name ? "-" + name : view.sort === "-" + name ? "" : name, page: 1 }));
    head.append(button);
    $("table").tHead.rows[0].append(head);
  }
  data.bands.forEach((band, k) => $("legend").append(element("span", band.name, "b" + k)));
  $("legend").append(element("span", data.masked, "masked"));
  showHeaders();
}
let waiting = 0;
form.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => change({ ...Object.fromEntries(FILTERS.map((name) => [name, form.elements[name].value])), page: 1 }), 80);
});
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", (event) => {
  event.preventDefault();
  change({ ...Object.fromEntries(FILTERS.map((name) => [name, ""])), page: 1 });
});
$("table").tBodies[0].addEventListener("click", (event) => {
  event.preventDefault();
  change({ open: event.target.closest("tr").dataset.key }, true);
});
$("previous").addEventListener("click", () => change({ page: view.page - 1 }));
$("next").addEventListener("click", () => change({ page: view.page + 1 }));
$("close").addEventListener("click", () => change({ open: "" }));
$("sample-previous").addEventListener("click", () => step(-1));
$("sample-next").addEventListener("click", () => step(1));
$("sample").addEventListener("close", () => {
  if (view.open && !$("sample").open) change({ open: "" });  // the event comes late: it may be open again
});
$("sample").addEventListener("click", (event) => { if (event.target === $("sample")) change({ open: "" }); });
$("strip").addEventListener("mouseover", pointAt);
$("strip").addEventListener("click", pointAt);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select")) return;
  const by = { j: 1, k: -1 }[event.key];
  if (event.key === "/") { event.preventDefault(); form.elements.q.focus(); }
  else if (by && $("sample").open) step(by);
  else if (by) {
    const links = [...$("table").querySelectorAll("tbody a")];
    const at = links.indexOf(document.activeElement);
    (links[at + by] ?? links[at < 0 ? 0 : at])?.focus();
  }
});
window.addEventListener("hashchange", () => { readAddress(); show(); });
window.addEventListener("popstate", () => { readAddress(); show(); });

build();
readAddress();
show();
