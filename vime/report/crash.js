// What vime/report/crash.py wrote: verdict, rows [label, value], tables with title, columns and rows of texts.
const CLASSES = { crashed: "is-bad", hung: "is-bad", "REMOVES IT": "is-good", survived: "is-good", SKIP: "is-calm" };

function coloured(text) {
  const made = element("span", text, CLASSES[text]);
  return CLASSES[text] ? made : text;
}
function show() {
  $("about").textContent = data.about;
  $("verdict").textContent = data.verdict;
  $("verdict").className = data.verdict === "CRASH" ? "is-bad" : "is-calm";
  $("result").replaceWith(Object.assign(facts(data.rows), { id: "result" }));
  for (const { title, columns, rows } of data.tables) {
    const scroll = element("div", undefined, "scroll");
    scroll.append(table(columns, rows.map((cells) => cells.map(coloured))));
    $("tables").append(element("h2", title), scroll);
  }
}
show();
