// Several runs side by side: the keys in which they differ, how each ends, that over a key, and which prompts only one solves.

import { ticks } from "./chart.js";
import { addSome, h, inUnit, number, replace } from "./dom.js";
import { colourOf, mean } from "./lines.js";

const OUTCOMES = ["eval/accuracy", "eval/dpo/accuracy", "eval/rm/accuracy", "eval/kto/accuracy", "eval/reward/mean", "eval/loss", "eval/nll", "accuracy", "reward/mean", "loss"];
const ENDS = 5; // training steps whose mean is the end of a run
const PAD = { left: 52, right: 12, top: 10, bottom: 24 };
const natural = new Intl.Collator("en", { numeric: true });
const order = (a, b) => (a !== "" && b !== "" ? a - b : NaN) || natural.compare(a, b); // numbers such as 1e-5 by their size

export function compareView(app) {
  const element = h("section", { class: "compare" });
  const state = { sort: { name: "", down: true }, metric: "", key: "", group: false, pair: [] };
  let drawn = "";

  const value = (run, key) => String(run.about.config[key] ?? "");
  const end = (run) => {
    const values = run.points(state.metric).map(([, one]) => one);
    return values.length ? mean(values.slice(state.metric.startsWith("eval/") ? -1 : -ENDS)) : null;
  };
  const told = (one) => (one === null ? "–" : inUnit(one, app.runs.map((run) => run.glossary.get(state.metric)?.unit).find(Boolean)));

  function draw() {
    const runs = app.runs.filter((_, i) => !app.hidden.has(i));
    const metrics = OUTCOMES.filter((name) => runs.some((run) => run.points(name).length));
    const all = [...new Set(runs.flatMap((run) => Object.keys(run.about.config)))];
    const keys = all.filter((key) => !/(^|\.)dir$/.test(key) && new Set(runs.map((run) => value(run, key))).size > 1);
    if (new Set(runs.map((run) => run.about.band)).size < 2 || !keys.length || !metrics.length) return replace(element);
    if (!metrics.includes(state.metric)) state.metric = metrics[0];
    if (!keys.includes(state.key)) state.key = keys[0];
    const now = JSON.stringify([app.bands, state, keys, metrics, runs.map((run) => [run.number, end(run), run.steps.size, run.rows.length])]);
    if (now === drawn && element.children.length) return; // the focus stays where it is
    drawn = now;
    const rows = state.group ? grouped(runs) : runs.map((run) => ({ run, runs: [run], end: end(run), steps: Math.max(0, ...run.steps.keys()) }));
    replace(element, controls(metrics, keys), h("div", { class: "beside-table" }, table(rows, state.group ? [state.key] : keys), over(runs)), solved(runs));
  }

  function grouped(runs) {
    const groups = new Map();
    for (const run of runs) groups.set(value(run, state.key), [...(groups.get(value(run, state.key)) ?? []), run]);
    return [...groups.values()].map((members) => {
      const ends = members.map(end).filter((one) => one !== null);
      return { runs: members, run: members[0], end: ends.length ? mean(ends) : null, low: Math.min(...ends), high: Math.max(...ends) };
    });
  }

  function choice(label, name, options, current, choose) {
    const field = h("select", { "aria-label": label, "data-compare": name }, options.map(([one, text]) => h("option", { value: one }, text)));
    field.value = current;
    field.addEventListener("change", () => (choose(field.value), draw(), element.querySelector(`[data-compare="${name}"]`)?.focus()));
    return h("label", {}, `${label} `, field);
  }

  function controls(metrics, keys) {
    const same = (names) => names.map((name) => [name, name]);
    const box = h("input", { type: "checkbox", id: "group" });
    box.checked = state.group;
    box.addEventListener("change", () => ((state.group = box.checked), draw(), document.getElementById("group").focus()));
    return h("div", { class: "controls" }, choice("compare", "metric", same(metrics), state.metric, (one) => (state.metric = one)), choice("over", "key", same(keys), state.key, (one) => (state.key = one)), h("label", { for: "group" }, box, " one row for each of its values"));
  }

  function table(rows, keys) {
    const { name, down } = state.sort;
    const columns = [["run", state.group ? "runs" : "run"], ...keys.map((key) => [key, key]), ["end", state.metric], state.group ? ["range", "from to"] : ["steps", "steps"]];
    const cell = (row, column) => (column === "end" ? row.end : column === "steps" ? row.steps : column === "range" ? row.high - row.low : column === "run" ? (state.group ? row.runs.length : row.run.name) : value(row.run, column));
    const compared = (a, b) => (a === null || b === null ? (a === null) - (b === null) : (down ? -1 : 1) * (typeof a === "number" ? a - b : order(a, b)));
    const listed = columns.some(([column]) => column === name) ? [...rows].sort((a, b) => compared(cell(a, name), cell(b, name))) : rows;
    const sortBy = (column) => ((state.sort = { name: column, down: name === column ? !down : ["end", "steps", "range"].includes(column) }), draw(), element.querySelector(`[data-sort="${CSS.escape(column)}"]`)?.focus());
    const head = columns.map(([column, label]) => h("th", { class: ["end", "steps", "range"].includes(column) ? "number" : null, "aria-sort": column === name ? (down ? "descending" : "ascending") : null }, h("button", { type: "button", "data-sort": column, onclick: () => sortBy(column) }, label, column === name ? (down ? " ↓" : " ↑") : null)));
    const body = listed.map((row) =>
      h(
        "tr",
        {},
        h("td", { class: `run run-${colourOf(app, row.run)}` }, state.group ? String(row.runs.length) : [h("span", { class: "swatch" }), row.run.name]),
        keys.map((key) => h("td", {}, value(row.run, key) || "–")),
        h("td", { class: "number" }, told(row.end)),
        h("td", { class: "number" }, state.group ? (row.end === null ? "–" : `${told(row.low)} to ${told(row.high)}`) : number(row.steps)),
      ),
    );
    return h("div", { class: "scroll" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
  }

  // The end of each run over a key, whose values stand side by side; a line joins their means.
  function over(runs) {
    const points = runs.map((run) => ({ run, at: value(run, state.key), end: end(run) })).filter((point) => point.end !== null);
    const values = [...new Set(points.map(({ at }) => at))].sort(order);
    const [width, height, ends] = [420, 180, points.map((point) => point.end)];
    const margin = (Math.max(...ends) - Math.min(...ends)) * 0.08 || 0.05;
    const [low, high] = [Math.min(...ends) - margin, Math.max(...ends) + margin];
    const x = (at) => PAD.left + ((values.indexOf(at) + 0.5) / values.length) * (width - PAD.left - PAD.right);
    const y = (one) => height - PAD.bottom - ((one - low) / (high - low)) * (height - PAD.top - PAD.bottom);
    const grid = ticks(low, high).map((one) => [h("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(one), y2: y(one) }), h("text", { class: "axis", x: PAD.left - 6, y: y(one) + 4, "text-anchor": "end" }, told(one))]);
    const labels = values.map((at) => h("text", { class: "axis", x: x(at), y: height - 6, "text-anchor": "middle" }, at.length > 24 ? `…${at.slice(-23)}` : at || "–"));
    const line = values.map((at, i) => `${i ? "L" : "M"}${x(at)} ${y(mean(points.filter((point) => point.at === at).map((point) => point.end)))}`).join("");
    const dots = points.map(({ run, at, end: one }) => h("circle", { class: `line run-${colourOf(app, run)}`, cx: x(at), cy: y(one), r: 4.5 }, h("title", {}, `${run.name}: ${told(one)}`)));
    const title = `${state.metric} over ${state.key}`;
    return h("figure", { class: "chart" }, h("figcaption", {}, title), h("svg", { class: "plot over", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, grid, labels, h("path", { class: "means", d: line }), dots));
  }

  // Held-out prompts of the last evaluation of each, by which of two runs solves more than half of their samples.
  function solved(runs) {
    const able = runs.filter((run) => run.rows.some((row) => row.set === "eval"));
    if (able.length < 2) return null;
    const ranked = [...able].sort((a, b) => (end(a) ?? 0) - (end(b) ?? 0));
    const [one, other] = [ranked[0], ranked.at(-1)].map((run, i) => able.find((each) => each.number === state.pair[i]) ?? run);
    const [first, second] = [one, other].map(lastEvaluation);
    const shared = [...first.keys()].filter((prompt) => second.has(prompt));
    const where = (a, b) => shared.filter((prompt) => first.get(prompt).solved === a && second.get(prompt).solved === b);
    const choices = able.map((run) => [run.number, run.name]);
    const pick = (i) => (chosen) => (state.pair = i ? [one.number, Number(chosen)] : [Number(chosen), other.number]);
    const item = (prompt) => {
      const [a, b] = [first.get(prompt).row, second.get(prompt).row];
      return h("li", {}, h("span", { class: "question" }, a.question || prompt), " ", h("a", { href: `#${a.link}` }, a.answer || "(empty)"), " → ", h("a", { href: `#${b.link}` }, b.answer || "(empty)"));
    };
    const list = (title, prompts) => h("details", { "data-solved": title }, h("summary", {}, `${title} `, h("span", { class: "quiet" }, String(prompts.length))), addSome(h("ul", {}), prompts, 20, item, "prompts"));
    const both = `Of ${number(shared.length)} held-out prompts, both solve ${number(where(true, true).length)}, and neither ${number(where(false, false).length)}.`;
    return h("div", { class: "solved" }, h("div", { class: "controls" }, choice("A", "a", choices, one.number, pick(0)), choice("B", "b", choices, other.number, pick(1)), h("span", { class: "quiet" }, both)), list("solved by B, not by A", where(false, true)), list("solved by A, not by B", where(true, false)));
  }

  return { element, draw };
}

// The prompts of a run's last evaluation: a sample of each, and whether more than half of its samples succeeded.
function lastEvaluation(run) {
  const rows = run.rows.filter((row) => row.set === "eval" && !row.failure);
  const last = rows.reduce((step, row) => Math.max(step, row.step), 0);
  const best = rows.reduce((most, row) => Math.max(most, row.reward), -Infinity); // where no reward defines success
  const prompts = new Map();
  for (const row of rows.filter((row) => row.step === last)) prompts.set(row.prompt, [...(prompts.get(row.prompt) ?? []), row]);
  const succeeded = (row) => Number(row.more.success ?? row.reward >= best);
  return new Map([...prompts].map(([prompt, samples]) => [prompt, { row: samples[0], solved: mean(samples.map(succeeded)) > 0.5 }]));
}
