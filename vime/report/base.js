"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function number(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number" || (Number.isInteger(value) && Math.abs(value) < 1e9)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}
function facts(pairs, className = "facts") {
  const list = element("dl", undefined, className);
  for (const [name, value] of pairs) list.append(element("dt", name), element("dd", value));
  return list;
}
function row(cells, tag = "td") {
  const made = element("tr");
  for (const cell of cells) {
    if (cell instanceof Node) made.append(element(tag)), made.lastChild.append(cell);
    else made.append(element(tag, typeof cell === "number" ? number(cell) : cell, typeof cell === "number" ? "number" : undefined));
  }
  return made;
}
function table(heads, rows) {
  const made = element("table");
  made.append(element("thead"), element("tbody"));
  made.tHead.append(row(heads, "th"));
  const isNumber = heads.map((_, k) => rows.length > 0 && typeof rows[0][k] === "number");
  [...made.tHead.rows[0].cells].forEach((cell, k) => isNumber[k] && cell.classList.add("number"));
  made.tBodies[0].append(...rows.map((cells) => row(cells)));
  return made;
}
// ---------------------------------------------------------------- the view, kept in the address
const view = {};
function readAddress(names) {
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const name of names) view[name] = asked.get(name) ?? "";
}
function writeAddress() {
  const kept = new URLSearchParams(Object.entries(view).filter(([, value]) => value));
  const text = kept.toString().replaceAll("%2C", ",");
  history.replaceState(null, "", text ? "#" + text : location.href.split("#")[0]);
}
