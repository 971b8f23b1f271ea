// The configuration of each run, and the keys in which runs differ.

import { h, replace } from "./dom.js";
import { colourOf } from "./lines.js";

export function configView(app) {
  const filter = h("input", { type: "search", placeholder: "filter keys and values  ( / )", "data-search": true, "aria-label": "Filter keys and values" });
  const only = h("input", { type: "checkbox", id: "only-differences" });
  const table = h("div", { class: "scroll" });
  only.checked = app.runs.length > 1;
  filter.addEventListener("input", draw);
  only.addEventListener("change", draw);

  function draw() {
    const runs = app.runs.filter((_, i) => !app.hidden.has(i));
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.about.config)))];
    const facts = [["created", "created"], ["rl4llm version", "version"], ["run id", "run_id"], ["directory", "path"]];
    const needle = filter.value.toLowerCase();
    const rows = keys.flatMap((key) => {
      const values = runs.map((run) => (key in run.about.config ? String(run.about.config[key]) : null));
      const differs = values.some((value) => value !== values[0]);
      if (only.checked && runs.length > 1 && !differs) return [];
      if (needle && ![key, ...values].some((text) => text?.toLowerCase().includes(needle))) return [];
      const cells = values.map((value, i) => h("td", { class: differs && i > 0 && value !== values[0] ? "differs" : null }, value === null ? h("i", { class: "quiet" }, "not there") : value));
      return [h("tr", { class: differs ? "row-differs" : null }, h("th", { scope: "row" }, differs ? h("span", { class: "mark", title: "differs", "aria-label": "differs" }, "≠ ") : null, key), cells)];
    });
    const head = h("tr", {}, h("th", {}, "key"), runs.map((run) => h("th", { class: `run run-${colourOf(app, run)}` }, h("span", { class: "swatch" }), run.name)));
    const top = facts.map(([label, name]) => h("tr", { class: "fact" }, h("th", { scope: "row" }, label), runs.map((run) => h("td", {}, run.about[name] || "–"))));
    const none = runs.length > 1 && only.checked ? "These runs have the same configuration." : "No key matches.";
    replace(table, h("table", { class: "config" }, h("thead", {}, head), h("tbody", {}, top, rows.length ? rows : h("tr", {}, h("td", { colspan: runs.length + 1, class: "quiet" }, none)))));
  }
  draw();
  const compare = app.runs.length > 1 ? h("label", { for: "only-differences" }, only, " only what differs") : h("span", { class: "quiet" }, "To compare, name several runs: rl4llm view runs/a runs/b");
  return { element: h("section", {}, h("div", { class: "controls" }, filter, compare), table), update: draw };
}
