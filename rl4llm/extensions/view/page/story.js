// What happened: a headline for each run, episodes that show it, and some that look suspicious.

import { h, replace } from "./dom.js";
import { colourOf } from "./lines.js";

export function storyView(app) {
  const element = h("div", { class: "story" });
  const opened = new Set();
  let drawn = "";

  function draw() {
    const runs = app.runs.filter((run, i) => !app.hidden.has(i) && run.story);
    const many = app.runs.length > 1;
    const now = JSON.stringify([app.bands, runs.map((run) => [run.number, run.story, run.generation, run.rows.length])]);
    if (now === drawn) return; // the focus stays where it is
    drawn = now;
    replace(element, runs.map((run) => about(run, many)));
  }

  function about(run, many) {
    const { text, alerts } = run.story;
    const name = many ? [h("span", { class: "swatch" }), ` ${run.name}: `] : null;
    const parts = [cards(run, "shown", "Episodes that show it"), cards(run, "suspicious", "Worth a look: these could be wrong")].filter(Boolean);
    let inside = parts;
    if (many && parts.length) {
      inside = h("details", { open: opened.has(run.number) }, h("summary", {}, "Episodes that show it"), parts);
      inside.addEventListener("toggle", () => (inside.open ? opened.add(run.number) : opened.delete(run.number)));
    }
    return h("section", { class: `run-${colourOf(app, run)}`, "data-story": run.number }, h("h1", {}, name, text), h("p", { class: "quiet" }, alerts), inside);
  }

  function cards(run, part, title) {
    const current = run.story.generation === run.generation;
    const listed = (current ? run.story[part] : []).map((item) => ({ ...item, row: run.rows[item.number] })).filter(({ row }) => row);
    if (!listed.length) return null;
    const card = ({ why, row }) =>
      h("a", { class: "card", href: `#${row.link}` }, h("b", {}, why), h("span", { class: "question" }, row.question || row.prompt), h("span", { class: "answer" }, row.answer || "(empty)"));
    return h("div", { class: `cards ${part}` }, h("h2", {}, title), h("div", { class: "row" }, listed.map(card)));
  }

  return { element, draw };
}
