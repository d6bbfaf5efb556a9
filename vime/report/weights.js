// What vime/report/weights.py wrote: sides [name, a, b], findings, kinds that occur (name, symbol, group), tensors with
// layer, column (the name without layer and expert), kind, and where they differ detail, partner_layer and numbers.
const TABLE_STEP = 200;
const NUM_BARS = 15;
const kinds = new Map(data.kinds.map((kind, order) => [kind.name, { ...kind, order }]));
const differing = data.tensors.filter((tensor) => tensor.kind !== "equal");
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
let numRows = TABLE_STEP;

function badge(kind, text) {
  const { symbol, group } = kinds.get(kind);
  return element("span", text ?? `${symbol} ${kind}`, `badge g-${group}`);
}
function change(what) {
  Object.assign(view, what);
  numRows = TABLE_STEP;
  writeAddress();
  show();
}

// ---------------------------------------------------------------- what was found
function showHeader() {
  document.querySelector("h1").textContent = data.title;
  $("overall").append(element("span", data.is_equal ? "✓ EQUAL" : "✕ DIFFERENT", `badge g-${data.is_equal ? "equal" : "missing"}`), data.summary);
  const sides = table(["", "a", "b"], data.sides.filter(([, a, b]) => a || b));
  sides.id = "sides";
  $("sides").replaceWith(sides);
  $("notes").append(...data.notes.map((note) => element("li", note)));
  $("notes").hidden = !data.notes.length;
}
function showFindings() {
  if (!data.findings.length) return;
  $("findings").append(element("h2", plural(data.findings.length, "finding")));
  for (const found of data.findings) {
    const item = element("div", undefined, "finding");
    const text = element("p");
    text.append(element("b", found.where), `: ${found.detail}`);
    item.append(badge(found.kind), text);
    if (found.tensors.length) {
      const button = element("button", plural(found.tensors.length, "tensor"));
      button.type = "button";
      button.addEventListener("click", () => {
        change({ q: found.tensors.length === 1 ? found.tensors[0] : sharedWords(found.tensors), kind: "" });
        $("filters").scrollIntoView();
      });
      item.append(button);
    }
    $("findings").append(item);
  }
}
// The beginning that all names have in common, up to a dot.
function sharedWords(names) {
  let shared = names[0];
  for (const name of names) while (!name.startsWith(shared)) shared = shared.slice(0, -1);
  return shared.slice(0, shared.lastIndexOf(".") + 1);
}

// ---------------------------------------------------------------- layers x tensors
const OUTSIDE = "outside";
function cellsOf(tensors) {
  const cells = new Map();
  for (const tensor of tensors) {
    const key = `${tensor.layer ?? OUTSIDE} ${tensor.column}`;
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push(tensor);
  }
  return cells;
}
const layerPrefix = (tensor) => (tensor.layer === null ? "" : tensor.name.match(/^.*?\.\d+\./)[0]);
function fillCell(cell, tensors, place) {
  const worst = tensors.reduce((a, b) => (kinds.get(b.kind).order < kinds.get(a.kind).order ? b : a));
  const { symbol, group } = kinds.get(worst.kind);
  cell.className = `g-${group}`;
  const num = tensors.filter((tensor) => tensor.kind !== "equal").length;
  const isMoved = worst.kind === "swapped" && worst.partner_layer !== null && worst.partner_layer !== worst.layer;
  const counted = tensors.length > 1 && num ? `, ${num} of ${tensors.length} tensors` : "";
  const said = `${place}: ${worst.kind}${counted}${worst.detail ? `, ${worst.detail}` : ""}`;
  cell.title = said;
  if (!num) return cell.append(symbol);
  const button = element("button", isMoved ? `→${worst.partner_layer}` : symbol);
  button.type = "button";
  button.setAttribute("aria-label", said);
  for (const event of ["focus", "pointerenter"]) button.addEventListener(event, () => { $("pointed").textContent = said; });
  button.addEventListener("click", () => {
    change({ q: [layerPrefix(worst), ...worst.column.split(".*.")].filter(Boolean).join(" "), kind: "" });
    $("filters").scrollIntoView();
  });
  cell.append(button);
}
function gridRow(head, columns, cells, key) {
  const made = element("tr");
  const name = element("th", head);
  name.scope = "row";
  made.append(name);
  for (const column of columns) {
    const cell = element("td");
    const tensors = cells.get(`${key} ${column}`);
    if (tensors) fillCell(cell, tensors, `${head}, ${column}`);
    else cell.className = "is-absent";
    made.append(cell);
  }
  return made;
}
function showGrid() {
  const tensors = data.tensors.slice(0, data.num_tensors);
  const inside = tensors.filter((tensor) => tensor.layer !== null);
  const layers = [...new Set(inside.map((tensor) => tensor.layer))].sort((a, b) => a - b);
  const columns = [...new Set(inside.map((tensor) => tensor.column))];
  const cells = cellsOf(tensors);
  const head = element("tr");
  head.append(element("th"));
  for (const column of columns) {
    const cell = element("th");
    cell.scope = "col";
    cell.append(element("span", column));
    head.append(cell);
  }
  const grid = $("grid");
  grid.append(element("thead"), element("tbody"));
  if (columns.length) grid.tHead.append(head);
  grid.tBodies[0].append(...layers.map((layer) => gridRow(`layer ${layer}`, columns, cells, layer)));
  const outside = tensors.filter((tensor) => tensor.layer === null);
  for (const tensor of outside) {
    const made = gridRow(tensor.column.replace(/^model\./, ""), [tensor.column], cells, OUTSIDE);
    if (columns.length > 1) made.append(element("td", undefined, "is-absent"));
    grid.tBodies[0].append(made);
  }
  $("map").hidden = !tensors.length;
  for (const kind of data.kinds) {
    const item = element("span");
    item.append(badge(kind.name, kind.symbol), kind.name);
    $("legend").append(item);
  }
  if (differing.some((tensor) => tensor.kind === "swapped" && tensor.partner_layer !== tensor.layer)) {
    const item = element("span");
    item.append(badge("swapped", "→n"), "holds the tensor of layer n");
    $("legend").append(item);
  }
}
function showPlot() {
  const measured = differing.filter((tensor) => typeof tensor.relative_l2 === "number");
  if (!measured.length) return;
  const largest = measured.sort((a, b) => b.relative_l2 - a.relative_l2).slice(0, NUM_BARS);
  const series = { name: "", x: largest.map((tensor) => tensor.name), y: largest.map((tensor) => tensor.relative_l2), texts: [] };
  $("plot").append(plotFigure({
    kind: "bars", title: "Largest differences", x: "tensor", y: "relative L2 of the difference", series: [series],
    limit: null, limit_text: "", is_log: true,
    note: measured.length > NUM_BARS ? `the ${NUM_BARS} largest of ${measured.length}; all are in the table below` : "",
  }));
}

// ---------------------------------------------------------------- every tensor
const chosenKind = () => view.kind || (differing.length ? "different" : "all");  // what differs comes first
function matching() {
  const words = view.q.toLowerCase().split(/\s+/).filter(Boolean);
  const found = data.tensors.filter((tensor) =>
    (chosenKind() === "all" || (chosenKind() === "different" ? tensor.kind !== "equal" : tensor.kind === view.kind))
    && words.every((word) => tensor.name.toLowerCase().includes(word)));
  const size = (tensor) => (typeof tensor.relative_l2 === "number" ? tensor.relative_l2 : tensor.kind === "equal" ? -1 : 0);
  return view.sort === "gap" ? found.sort((a, b) => size(b) - size(a)) : found;
}
function show() {
  const [form, found] = [$("filters").elements, matching()];
  for (const name of ["q", "sort"]) if (form[name].value !== view[name]) form[name].value = view[name];
  for (const button of $("filter").children) button.setAttribute("aria-pressed", button.dataset.kind === chosenKind());
  $("count").textContent = found.length === data.tensors.length ? plural(found.length, "tensor") : `${found.length} of ${plural(data.tensors.length, "tensor")}`;
  const hasGaps = found.some((tensor) => typeof tensor.relative_l2 === "number");
  const heads = ["tensor", "difference", ...(hasGaps ? ["max abs", "relative L2", "cosine"] : ["l2 of a", "l2 of b"]), "shape", "dtype"];
  const rows = found.slice(0, numRows).map((tensor) => {
    const numbers = hasGaps ? [tensor.max_abs, tensor.relative_l2, tensor.cosine] : [tensor.l2_a, tensor.l2_b];
    const made = row([brokenAtDots(tensor.name), difference(tensor), ...numbers.map((v) => (v === null || v === undefined ? "" : v)), tensor.shape, tensor.dtype]);
    made.dataset.key = tensor.name;
    mark([...made.cells]);
    return made;
  });
  const made = table(heads, []);
  made.id = "table";
  mark([...made.tHead.rows[0].cells]);
  made.tBodies[0].append(...rows);
  $("table").replaceWith(made);
  $("more").hidden = found.length <= numRows;
}
function brokenAtDots(name) {
  const made = element("span");
  name.split(/(?<=\.)/).forEach((part) => made.append(part, element("wbr")));
  return made;
}
function difference(tensor) {
  const made = element("span");
  made.append(badge(tensor.kind), " ", tensor.detail ?? "");
  return made;
}
function mark(cells) {
  cells.slice(2, -2).forEach((cell) => cell.classList.add("number"));
  cells.at(-2).classList.add("c-shape");
  cells.at(-1).classList.add("c-dtype");
}
function showFilter() {
  const chip = (kind, text) => {
    const button = element("button", text);
    button.type = "button";
    button.dataset.kind = kind;
    button.addEventListener("click", () => change({ kind }));
    $("filter").append(button);
  };
  if (differing.length) chip("different", `different ${differing.length}`);
  chip("all", `all ${data.tensors.length}`);
  for (const { name, symbol } of data.kinds) {
    const num = data.tensors.filter((tensor) => tensor.kind === name).length;
    if (num) chip(name, `${symbol} ${name} ${num}`);
  }
}
function read() {
  readAddress(["q", "kind", "sort"]);
  show();
}
showHeader();
showFindings();
showGrid();
showPlot();
showFilter();
$("filters").addEventListener("input", (event) => change({ [event.target.name]: event.target.value }));
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("more").addEventListener("click", () => { numRows += TABLE_STEP; show(); });
window.addEventListener("hashchange", read);
read();
