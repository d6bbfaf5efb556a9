// ---------------------------------------------------------------- plots: what vime/align/plots.py describes
// Drawn at the width there is, anew when it changes. Every point can be pointed at, by mouse, touch or arrow keys, and
// stands in the table behind the plot.
const PLOT_HEIGHT = 240;
const BAR_ROWS = 30;
const TABLE_ROWS = 1000;

function plotFigure(plot) {
  const figure = element("figure", undefined, "plot");
  const area = svg("svg", { tabindex: 0, role: "img", "aria-label": `${plot.title}. ${plotSummary(plot)}` });
  const pointed = element("p", "", "pointed");
  pointed.setAttribute("role", "status");
  figure.append(element("figcaption", plot.title), ...plotLegend(plot), area, pointed);
  if (plot.note) figure.append(element("p", plot.note, "none"));
  figure.append(plotTable(plot));
  const drawn = { plot, area, pointed, points: [], at: -1 };
  new ResizeObserver(() => drawPlot(drawn)).observe(figure);
  area.addEventListener("pointermove", (event) => pointNearest(drawn, event));
  area.addEventListener("pointerdown", (event) => pointNearest(drawn, event));
  area.addEventListener("focus", () => drawn.at < 0 && pointAt(drawn, 0));
  area.addEventListener("keydown", (event) => pointByKey(drawn, event));
  return figure;
}
function plotSummary(plot) {
  const values = plot.series.flatMap((s) => s.y).filter((v) => v !== null);
  if (!values.length) return "No values.";
  const [low, high] = extent(values);
  const limit = plot.limit === null ? "" : `, limit ${number(plot.limit)}`;
  return `${values.length} values of ${plot.y} from ${number(low)} to ${number(high)}${limit}; arrow keys go from one to the next.`;
}
const extent = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
const hasReason = (plot) => plot.limit_text && Number(plot.limit_text) !== plot.limit;
const limitText = (plot) => `limit ${number(plot.limit)}${hasReason(plot) ? `, ${plot.limit_text}` : ""}`;
const seriesClass = (k) => `s${k % 6} d${Math.floor(k / 6) % 4}`;
function plotLegend(plot) {
  if (plot.series.length < 2) return [];
  const legend = element("p", undefined, "legend");
  plot.series.forEach((series, k) => {
    const item = element("span");
    const mark = svg("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" });
    mark.append(svg("line", { x1: 0, x2: 22, y1: 4, y2: 4, class: seriesClass(k) }));
    item.append(mark, series.name);
    legend.append(item);
  });
  return [legend];
}
function plotTable(plot) {
  const rows = plot.series.flatMap((series) => series.y.map((y, i) => ({ series: series.name, x: placeText(plot, series, i), y, text: series.texts[i] })));
  const details = element("details");
  details.append(element("summary", `Table: ${rows.length} value${rows.length === 1 ? "" : "s"}`));
  details.addEventListener("toggle", () => {
    if (!details.open || details.children.length > 1) return;
    const size = ({ y }) => (y === null ? Infinity : Math.abs(y));
    const shown = plot.kind === "scatter" ? rows.sort((a, b) => size(b) - size(a) || 0) : rows;
    const [hasSeries, hasTexts] = [plot.series.length > 1, plot.series.some((s) => s.texts.length)];
    const heads = [...(hasSeries ? ["series"] : []), plot.x, ...(hasTexts ? ["text"] : []), plot.y];
    const cells = shown.slice(0, TABLE_ROWS).map((r) => [...(hasSeries ? [r.series] : []), r.x, ...(hasTexts ? [r.text ?? ""] : []), r.y ?? "not finite"]);
    const box = element("div", undefined, "scroll");
    box.tabIndex = 0;
    box.append(table(heads, cells));
    details.append(box);
    if (rows.length > TABLE_ROWS) details.append(element("p", `the first ${TABLE_ROWS} of ${rows.length}`, "none"));
  });
  return details;
}
function placeText(plot, series, i) {
  if (plot.kind === "histogram") return `${number(series.x[i])} to ${number(series.x[i + 1])}`;
  return number(series.x[i]);
}
function pointText(plot, point) {
  const series = plot.series[point.series];
  const name = plot.series.length > 1 && series.name ? `${series.name}, ` : "";
  const text = series.texts[point.i] ? `, ${series.texts[point.i]}` : "";
  const value = series.y[point.i] === null ? "not finite" : number(series.y[point.i]);
  const place = plot.kind === "bars" ? placeText(plot, series, point.i) : `${plot.x} ${placeText(plot, series, point.i)}`;
  return `${name}${place}${text}: ${value} ${plot.y}`;
}

// ---------------------------------------------------------------- pointing
function pointAt(drawn, at) {
  if (!drawn.points[at]) return;
  drawn.at = at;
  const { x, y } = drawn.points[at];
  drawn.pointed.textContent = pointText(drawn.plot, drawn.points[at]);
  drawn.area.querySelector(".at")?.remove();
  drawn.area.append(svg("circle", { class: "at", cx: x, cy: y, r: 6 }));
}
function pointNearest(drawn, event) {
  const box = drawn.area.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const weight = { scatter: 1, bars: 100 }[drawn.plot.kind] ?? 0.05;  // a curve is read along x, bars along y
  let [best, at] = [Infinity, -1];
  drawn.points.forEach((p, k) => {
    const distance = (drawn.plot.kind === "bars" ? 0 : (p.x - x) ** 2) + weight * (p.y - y) ** 2;
    if (distance < best) [best, at] = [distance, k];
  });
  pointAt(drawn, at);
}
function pointByKey(drawn, event) {
  const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
  if (by === undefined) return;
  event.preventDefault();
  pointAt(drawn, Math.min(drawn.points.length - 1, Math.max(0, drawn.at + by)));
}

// ---------------------------------------------------------------- axes
function linearTicks(low, high, num) {
  const rough = (high - low) / num || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(Number((k * step).toPrecision(12)));
  return ticks;
}
function linearAxis(values, from, to, num = 5, hasZero = false) {
  let [low, high] = values.length ? extent(values) : [0, 1];
  if (hasZero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (low === high) [low, high] = low === 0 ? [0, 1] : [Math.min(low, 0), Math.max(high, 0)];
  return { place: (v) => from + ((v - low) / (high - low)) * (to - from), ticks: linearTicks(low, high, num).map((v) => [v, number(v)]) };
}
// Sizes on decades; zero, which has none, lies on the floor.
function logAxis(values, from, to) {
  const sizes = values.map(Math.abs).filter((v) => v > 0);
  const hasZero = sizes.length < values.length;
  if (!sizes.length) return { place: () => from, ticks: [[0, "0"]] };
  let [low, high] = extent(sizes).map(Math.log10);
  [low, high] = [Math.floor(low - 1e-9), Math.ceil(high + 1e-9)];
  const start = hasZero ? from + Math.sign(to - from) * 22 : from;
  const place = (v) => (v === 0 ? from : start + ((Math.log10(Math.abs(v)) - low) / (high - low)) * (to - start));
  const step = Math.max(1, Math.ceil((high - low) / 6));
  const ticks = hasZero ? [[0, "0"]] : [];
  for (let d = low; d <= high; d += step) ticks.push([10 ** d, d >= -3 && d <= 4 ? String(Number((10 ** d).toPrecision(3))) : `1e${d}`]);
  return { place, ticks };
}
function frame(drawn, yAxis, box) {
  for (const [value, text] of yAxis.ticks) {
    const y = yAxis.place(value);
    drawn.area.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y }));
    drawn.area.append(svg("text", { x: box.left - 6, y: y + 4, "text-anchor": "end" }, text));
  }
}
function xTicks(drawn, ticks, box) {
  const widest = Math.max(...ticks.map(([, text]) => text.length), 1) * 7 + 14;
  const every = Math.max(1, Math.ceil((ticks.length * widest) / Math.max(box.right - box.left, 1)));
  ticks.forEach(([x, text], k) => {
    if (k % every) return;
    drawn.area.append(svg("line", { class: "grid", x1: x, x2: x, y1: box.bottom, y2: box.bottom + 4 }));
    const half = text.length * 3.4;
    const at = Math.min(Math.max(x, half), box.width - half);
    drawn.area.append(svg("text", { x: at, y: box.bottom + 17, "text-anchor": "middle" }, text));
  });
}
function axisNames(drawn, box) {
  const { plot } = drawn;
  const hasSigns = plot.is_log && plot.series.some((s) => s.y.some((v) => v < 0));
  drawn.area.append(svg("text", { class: "name", x: 0, y: 12 }, hasSigns ? `|${plot.y}|` : plot.y));
  drawn.area.append(svg("text", { class: "name", x: box.right, y: box.bottom + 33, "text-anchor": "end" }, plot.x));
}

// ---------------------------------------------------------------- drawing
function drawPlot(drawn) {
  const width = Math.floor(drawn.area.parentElement.clientWidth);
  if (!width || width === drawn.width) return;
  drawn.width = width;
  drawn.points = [];
  drawn.area.replaceChildren();
  const height = drawn.plot.kind === "bars" ? drawBars(drawn, width) : drawAxes(drawn, width);
  drawn.area.setAttribute("height", height);
  if (drawn.at >= 0) pointAt(drawn, drawn.at);
}
function drawAxes(drawn, width) {
  const { plot } = drawn;
  const box = { left: 58, right: width - 10, top: 26, bottom: PLOT_HEIGHT - 40, width };
  const isHistogram = plot.kind === "histogram";
  const missing = plot.series.some((s) => s.y.includes(null));
  const values = plot.series.flatMap((s) => s.y).filter((v) => v !== null);
  if (!isHistogram && plot.limit !== null) values.push(plot.limit);
  const ceiling = box.top + (missing ? 16 : 0);
  const yAxis = plot.is_log ? logAxis(values, box.bottom, ceiling) : linearAxis(values, box.bottom, ceiling, 4, !["line", "steps"].includes(plot.kind));
  frame(drawn, yAxis, box);
  axisNames(drawn, box);
  if (missing) drawn.area.append(svg("text", { x: box.left - 6, y: box.top + 4, "text-anchor": "end" }, "nan, inf"));
  const places = xPlaces(plot, box);
  xTicks(drawn, places.ticks, box);
  plot.series.forEach((series, k) => drawSeries(drawn, series, k, places, yAxis, box));
  drawLimit(drawn, isHistogram ? places.of(plot.limit) : yAxis.place(plot.limit), box, isHistogram);
  return PLOT_HEIGHT;
}
function drawLimit(drawn, at, box, isUpright) {
  const { plot } = drawn;
  if (plot.limit === null) return;
  const ends = isUpright ? { x1: at, x2: at, y1: box.top, y2: box.bottom } : { x1: box.left, x2: box.right, y1: at, y2: at };
  drawn.area.append(svg("line", { class: "limit", ...ends }));
  const long = limitText(plot);
  const text = long.length * 6.2 > box.right - box.left ? `limit ${number(plot.limit)}` : long;
  const isHigh = !isUpright && at < box.top + 16;
  const y = isUpright ? box.top + 2 : isHigh ? at + 14 : at - 5;
  drawn.area.append(svg("text", { class: "limit", x: isUpright && at < box.right / 2 ? at + 5 : isUpright ? at - 5 : box.right, y, "text-anchor": isUpright && at < box.right / 2 ? "start" : "end" }, text));
}
// Where x lies: numbers on an axis, names side by side, each with its own room.
function xPlaces(plot, box) {
  const every = plot.series.flatMap((s) => s.x);
  const edges = plot.kind === "histogram" && plot.limit !== null ? [...every, plot.limit] : every;
  if (plot.kind !== "steps" && every.every((x) => typeof x === "number")) {
    const axis = linearAxis(edges, box.left + 4, box.right - 4, Math.max(2, Math.floor((box.right - box.left) / 90)));
    return { of: axis.place, ticks: axis.ticks.map(([v, text]) => [axis.place(v), text]), room: 0 };
  }
  const names = [...new Set(every.map(String))];
  const at = new Map(names.map((name, k) => [name, k]));
  const room = (box.right - box.left) / Math.max(names.length, 1);
  const of = (x) => box.left + (at.get(String(x)) + 0.5) * room;
  return { of, ticks: names.map((name) => [of(name), name]), room };
}
function drawSeries(drawn, series, k, places, yAxis, box) {
  const { kind } = drawn.plot;
  const middle = (i) => (kind === "histogram" ? (places.of(series.x[i]) + places.of(series.x[i + 1])) / 2 : places.of(series.x[i]));
  const points = series.y.map((y, i) => ({ series: k, i, x: middle(i), y: y === null ? box.top : yAxis.place(y), isMissing: y === null }));
  for (const p of points) drawn.points.push(p);
  const path = { scatter: dotsPath, line: curvePath, steps: stepsPath, histogram: areaPath }[kind](points, series, places, box);
  const className = { scatter: "dots", line: "curve", steps: "curve", histogram: "area" }[kind];
  drawn.area.append(svg("path", { d: path, class: `${seriesClass(k)} ${className}` }));
  if (kind === "line" && points.length <= 200) drawn.area.append(svg("path", { d: dotsPath(points), class: `s${k % 6} dots` }));
  const crosses = points.filter((p) => p.isMissing).map((p) => `M${px(p.x - 3)} ${px(p.y - 3)}l6 6m0 -6l-6 6`).join("");
  if (crosses) drawn.area.append(svg("path", { d: crosses, class: "missing" }));
}
const px = (v) => Math.round(v * 10) / 10;
const dotsPath = (points) => points.filter((p) => !p.isMissing).map((p) => `M${px(p.x)} ${px(p.y)}h0`).join("");
function curvePath(points) {
  let isBroken = true;
  return points.map((p) => {
    const start = isBroken ? "M" : "L";
    isBroken = p.isMissing;
    return p.isMissing ? "" : `${start}${px(p.x)} ${px(p.y)}`;
  }).join("");
}
function stepsPath(points, series, { room }) {
  let isBroken = true;
  return points.map((p) => {
    const start = isBroken ? "M" : "L";
    isBroken = p.isMissing;
    return p.isMissing ? "" : `${start}${px(p.x - room / 2)} ${px(p.y)}H${px(p.x + room / 2)}`;
  }).join("");
}
function areaPath(points, series, places, box) {
  if (!points.length) return "";
  const tops = points.map((p, i) => `V${px(p.y)}H${px(places.of(series.x[i + 1]))}`).join("");
  return `M${px(places.of(series.x[0]))} ${box.bottom}${tops}V${box.bottom}Z`;
}
function drawBars(drawn, width) {
  const { plot } = drawn;
  const names = [...new Set(plot.series.flatMap((s) => s.x))];
  const shown = names.slice(0, BAR_ROWS);
  const values = plot.series.flatMap((s) => s.y).filter((v) => v !== null);
  if (plot.limit !== null) values.push(plot.limit);
  if (plot.is_log) values.push(...values.filter((v) => v !== 0).map((v) => v / 3));  // the shortest bar is one too
  const axis = plot.is_log ? logAxis(values, 2, width - 10) : linearAxis(values, 2, width - 10, 4, true);
  const [thick, top] = [9, 24];
  const height = 20 + plot.series.length * (thick + 2) + 6;
  drawn.area.append(svg("text", { x: 0, y: 13 }, `${plot.y} by ${plot.x}`));
  shown.forEach((name, k) => {
    const y = top + k * height;
    const room = Math.floor((width - 90) / 6.8);
    drawn.area.append(svg("text", { class: "name", x: 0, y: y + 13 }, name.length > room ? "…" + name.slice(1 - room) : name));
    plot.series.forEach((series, s) => {
      const i = series.x.indexOf(name);
      if (i >= 0) drawBar(drawn, { series: s, i, y: y + 18 + s * (thick + 2), thick, width, axis });
    });
  });
  const bottom = top + shown.length * height;
  if (names.length > BAR_ROWS) drawn.area.append(svg("text", { x: 0, y: bottom + 14 }, `${names.length - BAR_ROWS} more in the table`));
  if (plot.limit !== null) {
    const at = axis.place(plot.limit);
    drawn.area.append(svg("text", { class: "limit", x: Math.min(width, at + 60), y: bottom + 14, "text-anchor": "end" }, `limit ${number(plot.limit)}`));
  }
  return bottom + 20;
}
function drawBar(drawn, { series, i, y, thick, width, axis }) {
  const { plot } = drawn;
  const value = plot.series[series].y[i];
  const isOver = plot.limit !== null && value !== null && Math.abs(value) > plot.limit;
  drawn.area.append(svg("rect", { class: "back", x: 2, y, width: width - 12, height: thick }));
  const zero = plot.is_log ? 2 : axis.place(0);
  const end = value === null ? zero : axis.place(value);
  drawn.area.append(svg("rect", { class: `bar s${series % 6}${isOver ? " over" : ""}`, x: Math.min(zero, end), y, width: Math.abs(end - zero), height: thick }));
  if (plot.limit !== null) {
    const at = axis.place(plot.limit);
    drawn.area.append(svg("line", { class: "limit", x1: at, x2: at, y1: y - 2, y2: y + thick + 2 }));
  }
  const text = value === null ? "not finite" : number(value);
  if (plot.series.length === 1) drawn.area.append(svg("text", { class: isOver || value === null ? "limit" : "name", x: width - 10, y: y - 5, "text-anchor": "end" }, text));
  drawn.points.push({ series, i, x: end, y: y + thick / 2 });
}
