// What vime/report/align.py wrote: verdict, environment [name, value], checks in the order of the walk.
const SYMBOLS = { PASS: "✓", WARN: "!", FAIL: "✕", SKIP: "–", "NOT TESTED": "?" };
const classOf = (verdict) => "v-" + verdict.toLowerCase().replace(" ", "-");
const byName = new Map(data.checks.map((check) => [check.name, check]));
const titleOf = (check) => check.title || check.name;
const isFinding = (check) => check.verdict === "FAIL" && !check.follows;
const seconds = (value) => (value === null ? "" : value < 0.05 ? "0 s" : value < 9.95 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

function badge(verdict) {
  const made = element("span", verdict, `badge ${classOf(verdict)}`);
  made.dataset.symbol = SYMBOLS[verdict];
  return made;
}
function linkTo(check) {
  const link = element("a", `${check.step ? check.step + " " : ""}${check.name}`);
  link.href = "#open=" + check.name;
  link.addEventListener("click", (event) => { event.preventDefault(); goTo(check.name); });
  return link;
}
function withLinks(text, checks) {
  const made = element("p", text);
  checks.forEach((check, k) => made.append(k ? ", " : "", linkTo(check)));
  return made;
}

// ---------------------------------------------------------------- what a check says
function said(check) {
  const isAbsent = ["PASS", "SKIP", "NOT TESTED"].includes(check.verdict);
  const evidence = check.evidence.length ? element("div", check.evidence.join("\n"), "evidence mono") : "";
  const pairs = [
    ["Measured", check.measured], ["Limit", check.limit], ["Evidence", evidence],
    [isAbsent ? "Why" : "Likely cause", check.cause], ["Next step", check.next_step],
  ].filter(([, value]) => value);
  const list = facts(pairs.map(([name, value]) => [name, value instanceof Node ? "" : value]), "facts said");
  pairs.forEach(([name, value], k) => {
    if (value instanceof Node) list.children[2 * k + 1].append(value);
    if (name === "Next step") list.children[2 * k + 1].className = "next";
  });
  return pairs.length ? [list] : [];
}
function relations(check) {
  const parts = [];
  if (check.follows) parts.push(withLinks("A consequence, no finding of its own: follows from ", [byName.get(check.follows) ?? { name: check.follows }]));
  const explained = data.checks.filter((other) => other.follows === check.name);
  if (explained.length) parts.push(withLinks("Explains ", explained));
  return parts;
}
function fillBody(body, check) {
  if (check.guide) body.append(element("p", `Guide: ${check.guide}`, "none"));
  body.append(...relations(check), ...said(check));
  for (const plot of check.plots) body.append(plotFigure(plot));
  if (check.numbers.length) {
    const details = element("details");
    details.append(element("summary", plural(check.numbers.length, "number")), facts(check.numbers.map(([name, value]) => [name, number(value)])));
    body.append(details);
  }
}

// ---------------------------------------------------------------- the page
function showHeader() {
  $("about").textContent = data.about;
  $("overall").append(badge(data.verdict), data.summary);
  $("environment").replaceWith(Object.assign(facts(data.environment), { id: "environment" }));
  for (const check of data.checks) {
    const link = linkTo(check);
    link.className = classOf(check.verdict);
    link.title = `${titleOf(check)}: ${check.verdict}`;
    link.setAttribute("aria-label", link.title);
    link.replaceChildren(element("b", SYMBOLS[check.verdict]), check.step || check.name);
    $("strip").append(link);
  }
}
function finding(check) {
  const card = element("article", undefined, `finding is-${check.verdict.toLowerCase()}`);
  const head = element("h3");
  head.append(badge(check.verdict), titleOf(check), linkTo(check));
  card.append(head, ...said(check), ...relations(check));
  if (check.plots.length) card.append(withLinks(`${plural(check.plots.length, "plot")}: `, [check]));
  return card;
}
function showFindings() {
  const [found, warned] = [data.checks.filter(isFinding), data.checks.filter((check) => check.verdict === "WARN")];
  if (found.length) $("findings").append(element("h2", plural(found.length, "finding")), ...found.map(finding));
  if (warned.length) $("findings").append(element("h2", plural(warned.length, "warning")), ...warned.map(finding));
}
function walkItem(check) {
  const [item, details, summary, body] = [element("li"), element("details"), element("summary"), element("div", undefined, "body")];
  item.dataset.key = check.name;
  const title = element("span", undefined, "title");
  title.append(titleOf(check), " ", check.title ? element("span", check.name, "name") : "");
  const measured = check.measured || (check.follows ? `follows from ${check.follows}` : check.cause);
  summary.append(element("span", check.step, "step"), badge(check.verdict), title, element("span", measured, "measured"), element("span", seconds(check.seconds), "seconds"));
  details.append(summary, body);
  details.addEventListener("toggle", () => {
    if (details.open && !body.children.length) fillBody(body, check);
    keepOpen(check.name, details.open);
  });
  item.append(details);
  return item;
}
const opened = () => new Set(view.open.split(",").filter(Boolean));
function keepOpen(name, isOpen) {
  const names = opened();
  if (names.has(name) === isOpen) return;
  names[isOpen ? "add" : "delete"](name);
  view.open = [...names].join(",");
  writeAddress();
}
function goTo(name) {
  view.open = [...opened().add(name)].join(",");
  if (byName.get(name)?.verdict !== view.verdict) view.verdict = "";
  writeAddress();
  show();
  const item = document.querySelector(`#walk [data-key="${CSS.escape(name)}"]`);
  item?.scrollIntoView();
  item?.querySelector("summary").focus({ preventScroll: true });
}
function showFilter() {
  const chip = (verdict, text) => {
    const button = element("button", text);
    button.type = "button";
    button.dataset.verdict = verdict;
    button.addEventListener("click", () => { view.verdict = verdict; writeAddress(); show(); });
    return button;
  };
  const chips = Object.keys(SYMBOLS).map((verdict) => [verdict, data.checks.filter((check) => check.verdict === verdict).length]);
  $("filter").append(chip("", `all ${data.checks.length}`), ...chips.filter(([, n]) => n).map(([verdict, n]) => chip(verdict, `${SYMBOLS[verdict]} ${verdict} ${n}`)));
}
function show() {
  let num = 0;
  const names = opened();
  for (const item of $("walk").children) {
    item.hidden = view.verdict !== "" && byName.get(item.dataset.key).verdict !== view.verdict;
    num += !item.hidden;
    item.firstChild.open = names.has(item.dataset.key);
  }
  for (const button of $("filter").children) button.setAttribute("aria-pressed", button.dataset.verdict === view.verdict);
  $("count").textContent = !data.checks.length ? "No check was asked for." : view.verdict ? `${num} of ${plural(data.checks.length, "check")}` : plural(num, "check");
}
showHeader();
showFindings();
showFilter();
$("walk").append(...data.checks.map(walkItem));
readAddress(["verdict", "open"]);
window.addEventListener("hashchange", () => { readAddress(["verdict", "open"]); show(); });
show();
