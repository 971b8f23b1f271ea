// One prompt through all steps: a row for each step in which it was sampled or evaluated.

import { h, number, replace } from "./dom.js";
import { asRow, dots, groupsOf, rewardRange, words } from "./groups.js";

export function promptView(app) {
  const element = h("article", {});
  let place = [];

  function enter(given) {
    place = given;
    draw();
  }

  function draw() {
    const [run, id] = [app.runs[Number(place[0])], decodeURIComponent(place[1] ?? "")];
    const rows = run?.rows.filter((row) => row.prompt === id) ?? [];
    const back = h("div", { class: "crumbs" }, h("a", { href: "#/episodes" }, "‹ all episodes"));
    if (!rows.length) return replace(element, back, h("p", { class: "warning" }, "No episode of this prompt is stored; the run may have been resumed."));
    const found = [...groupsOf(rows).values()].map((members) => asRow(members, members));
    found.sort((a, b) => (a.step ?? 0) - (b.step ?? 0) || b.set.localeCompare(a.set) || a.number - b.number);
    app.list = found.flatMap((row) => row.members);
    const range = rewardRange(run.rows);
    const line = (row) =>
      h(
        "tr",
        { "data-row": row.number, onclick: (event) => event.target.closest("a") || app.go(row.members[0].link) },
        h("td", { class: "number" }, number(row.step)),
        h("td", {}, row.set === "eval" ? "held-out" : "training", row.role ? `, ${row.role}` : null),
        h("td", {}, dots(row.members, range)),
        h("td", { class: "number" }, h("b", {}, number(row.reward))),
        h("td", { class: "words" }, words(row).slice(1)),
      );
    const head = ["step", "set", "samples", "reward", "best answer"].map((label) => h("th", { class: { step: "number", reward: "number", samples: "samples", "best answer": "words" }[label] }, label));
    const title = h("h1", {}, found[0].question || id, h("span", { class: "quiet" }, ` prompt ${id}${app.runs.length > 1 ? ` of ${run.name}` : ""}`));
    replace(element, back, title, h("div", { class: "scroll" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, found.map(line)))));
  }

  return {
    element,
    enter,
    update: ({ rows }) => rows && draw(),
    key(event) {
      if (event.key !== "Escape") return false;
      app.go("/episodes");
      return true;
    },
  };
}

// Where this prompt was sampled, if in several steps.
export function promptLink(run, row) {
  run.places ??= new Map();
  if (run.counted !== run.rows.length) {
    run.places.clear();
    for (const { prompt, set, step } of run.rows) run.places.set(prompt, (run.places.get(prompt) ?? new Set()).add(`${set} ${step}`));
    run.counted = run.rows.length;
  }
  const steps = run.places.get(row.prompt)?.size ?? 0;
  return steps < 2 ? null : h("a", { class: "follow", title: "this prompt in all its steps", href: `#/prompt/${run.number}/${encodeURIComponent(row.prompt)}` }, `this prompt in ${steps} steps`);
}
