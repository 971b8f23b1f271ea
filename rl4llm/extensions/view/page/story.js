// What happened: a headline for each run, episodes that show it and some that look suspicious, and the differences of runs.

import { h, inUnit, number, replace, signed } from "./dom.js";
import { colourOf, linesOf, mean } from "./lines.js";
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
    const now = JSON.stringify([app.bands, runs.map((run) => [run.number, run.story, run.generation, run.rows.length, run.steps.size])]);
    if (now === drawn) return; // the focus stays where it is
    drawn = now;
    replace(element, runs.map((run) => about(run, many)), runs.length > 1 ? comparison(linesOf(app)) : null);
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
    return h("section", { class: `run-${colourOf(app, run)}`, "data-story": run.number }, h("h1", {}, name, text), h("p", { class: "quiet" }, alerts), inside);
  }

  function cards(run, part, title) {
    const current = run.story.generation === run.generation;
    const found = (current ? run.story[part] ?? [] : []).map((one) => ({ ...one, row: run.rows[one.number] })).filter(({ row }) => row);
    if (!found.length) return null;
    const card = ({ why, row }) =>
      h("a", { class: "card", href: `#${row.link}` }, h("b", {}, why), h("span", { class: "question" }, row.question || row.prompt), h("span", { class: "answer" }, row.answer || "(empty)"));
    return h("div", { class: `cards ${part}` }, h("h2", {}, title), h("div", { class: "row" }, found.map(card)));
  }

  return { element, draw };
}

// The last values of each line, held-out ones first, and what each differs from the first one.
function comparison(lines) {
  const runs = lines.flatMap((line) => line.runs);
  const rows = COMPARED.filter((name) => runs.some((run) => run.points(name).length)).map((name) => {
    const unit = runs.map((run) => run.glossary.get(name)).find(Boolean)?.unit;
    const values = lines.map((line) => line.runs.map((run) => latest(name, run.points(name))).filter((value) => value !== null));
    const first = values[0].length ? mean(values[0]) : null;
    const cells = values.map((own, i) => h("td", { class: "number" }, own.length ? inUnit(mean(own), unit) : "–", spread(own, unit), i && own.length && first !== null ? h("span", { class: "delta" }, ` ${difference(mean(own) - first, unit)}`) : null));
    return h("tr", { "data-compared": name }, h("th", { scope: "row" }, name), cells);
  });
  const head = lines.map(({ colour, name }) => h("th", { class: `run run-${colour} number` }, h("span", { class: "swatch" }), name));
  const seeds = lines.length < runs.length ? " Of seeds, the mean, the lowest and the highest." : "";
  const what = `Last values; of training, the mean of the last ${ENDS} steps.${seeds}${lines.length > 1 ? ` In brackets, the difference from ${lines[0].name}.` : ""}`;
  return h("section", {}, h("div", { class: "scroll" }, h("table", { class: "compare" }, h("thead", {}, h("tr", {}, h("th", {}, "metric"), head)), h("tbody", {}, rows))), h("p", { class: "quiet" }, what));
}

function spread(values, unit) {
  return values.length > 1 ? h("span", { class: "delta" }, ` ${inUnit(Math.min(...values), unit)} to ${inUnit(Math.max(...values), unit)}`) : null;
}

function latest(name, points) {
  const values = points.slice(name.startsWith("eval/") ? -1 : -ENDS).map(([, value]) => value);
  return values.length ? mean(values) : null;
}

function difference(value, unit) {
  return /^share/.test(unit ?? "") ? `(${signed(Number((100 * value).toFixed(2)))} points)` : `(${signed(Number(number(value).replaceAll(",", "")))})`;
}
