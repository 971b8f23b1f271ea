// What happened: a headline for each run, episodes that show it and some that look suspicious, and the differences of runs.

import { h, inUnit, number, replace, signed } from "./dom.js";
import { timeline } from "./timeline.js";

const COMPARED = ["eval/accuracy", "eval/reward/mean", "eval/loss", "accuracy", "reward/mean", "completion_length/mean", "truncated", "tokens/s"];
const ENDS = 5; // training steps that are averaged at the end

export function storyView(app) {
  const element = h("div", { class: "story" });
  const opened = new Set();
  let drawn = "";

  function draw() {
    const runs = app.runs.filter((run, i) => !app.hidden.has(i) && run.story);
    const many = app.runs.length > 1;
    const now = JSON.stringify(runs.map((run) => [run.number, run.story, run.generation, run.rows.length, run.steps.size]));
    if (now === drawn) return; // the focus stays where it is
    drawn = now;
    replace(element, runs.map((run) => about(run, many)), runs.length > 1 ? comparison(runs) : null);
  }

  function about(run, many) {
    const { text, alerts } = run.story;
    const name = many ? [h("span", { class: "swatch" }), ` ${run.name}: `] : null;
    const parts = [cards(run, "shown", "Episodes that show it"), cards(run, "suspicious", "Worth a look: these could be wrong"), timeline(run)].filter(Boolean);
    let inside = parts;
    if (many && parts.length) {
      inside = h("details", { open: opened.has(run.number) }, h("summary", {}, "Episodes that show it"), parts);
      inside.addEventListener("toggle", () => (inside.open ? opened.add(run.number) : opened.delete(run.number)));
    }
    return h("section", { class: `run-${run.number % 8}`, "data-story": run.number }, h("h1", {}, name, text), h("p", { class: "quiet" }, alerts), inside);
  }

  function cards(run, part, title) {
    const current = run.story.generation === run.generation;
    const found = (current ? run.story[part] ?? [] : []).map((one) => ({ ...one, row: run.rows[one.number] })).filter(({ row }) => row);
    if (!found.length) return null;
    const card = ({ why, row }) =>
      h("a", { class: "card", href: `#/episode/${run.number}/${row.number}` }, h("b", {}, why), h("span", { class: "question" }, row.question || row.prompt), h("span", { class: "answer" }, row.answer || "(empty)"));
    return h("div", { class: `cards ${part}` }, h("h2", {}, title), h("div", { class: "row" }, found.map(card)));
  }

  return { element, draw };
}

// The last values of each run, held-out ones first, and what each differs from the first run.
function comparison(runs) {
  const rows = COMPARED.filter((name) => runs.some((run) => run.points(name).length)).map((name) => {
    const unit = runs.map((run) => run.glossary.get(name)).find(Boolean)?.unit;
    const values = runs.map((run) => latest(name, run.points(name)));
    const cells = values.map((value, i) => h("td", { class: "number" }, value === null ? "–" : inUnit(value, unit), i && value !== null && values[0] !== null ? h("span", { class: "delta" }, ` ${difference(value - values[0], unit)}`) : null));
    return h("tr", { "data-compared": name }, h("th", { scope: "row" }, name), cells);
  });
  const head = runs.map((run) => h("th", { class: `run run-${run.number % 8} number` }, h("span", { class: "swatch" }), run.name));
  const what = `Last values; of training, the mean of the last ${ENDS} steps. In brackets, the difference from ${runs[0].name}.`;
  return h("section", {}, h("div", { class: "scroll" }, h("table", { class: "compare" }, h("thead", {}, h("tr", {}, h("th", {}, "metric"), head)), h("tbody", {}, rows))), h("p", { class: "quiet" }, what));
}

function latest(name, points) {
  const values = points.slice(name.startsWith("eval/") ? -1 : -ENDS).map(([, value]) => value);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function difference(value, unit) {
  return /^share/.test(unit ?? "") ? `(${signed(Number((100 * value).toFixed(2)))} points)` : `(${signed(Number(number(value).replaceAll(",", "")))})`;
}
