// The list of all episodes, by prompt or by sample: filtered and sorted here, searched by the source of the texts.

import { chatPanel } from "./chat.js";
import { h, number, replace } from "./dom.js";
import { asRow, dots, groupsOf, keyOf, rewardRange, withoutGradient, words } from "./groups.js";
import { colourOf } from "./lines.js";

const PAGE = 100;
const natural = new Intl.Collator("en", { numeric: true });
const COLUMNS = [
  { name: "run", label: "run", text: true },
  { name: "step", label: "step", down: true },
  { name: "set", label: "set", text: true },
  { name: "prompt", label: "prompt and answer", text: true },
  { name: "role", label: "role", text: true },
  { name: "sample", label: "sample" },
  { name: "reward", label: "reward", down: true },
  { name: "turns", label: "turns", down: true },
  { name: "tokens", label: "tokens", down: true, title: "that the policy wrote" },
  { name: "stop", label: "stopped by", text: true },
  { name: "mismatch", label: "worst mismatch", down: true, title: "largest difference of the log-probs of engine and trainer, in nats" },
];
const SETS = { "": "training and held-out", step: "training", eval: "held-out", failed: "failed" };

// By a column; null always comes last, and of equal rows the groups that differ come first.
function sorted(rows, { name, down }) {
  const sign = down ? -1 : 1;
  const ranks = new Map();
  if (COLUMNS.find((column) => column.name === name)?.text) [...new Set(rows.map((row) => row[name]))].sort(natural.compare).forEach((value, i) => ranks.set(value, i));
  const key = (row) => (ranks.size ? ranks.get(row[name]) : (row[name] ?? null));
  return rows.sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return x === y ? a.rank - b.rank || a.number - b.number : x === null ? 1 : -1;
    return sign * (x - y) || a.rank - b.rank || a.number - b.number;
  });
}

export function episodesView(app) {
  const state = (app.episodes ??= { filters: {}, by: "prompt", sort: { name: "step", down: true }, page: 0, found: null, at: 0 });
  const bar = h("div", { class: "controls" });
  const table = h("div", { class: "scroll" });
  const foot = h("div", { class: "pager" });
  let list = [];
  let choices = "";
  let range = [0, 1];

  const many = () => app.runs.length > 1;
  const all = () => app.runs.filter((_, i) => !app.hidden.has(i)).flatMap((run) => run.rows);

  function fits(row) {
    const f = state.filters;
    if (f.run && app.runs[row.run].name !== f.run) return false;
    if (f.set === "failed" ? !row.failure : f.set && row.set !== f.set) return false;
    if (f.stop && row.stop !== f.stop) return false;
    if (f.prompt && !row.prompt.toLowerCase().includes(f.prompt.toLowerCase())) return false;
    for (const name of ["step", "reward"]) {
      const [low, high] = [f[`${name}-from`], f[`${name}-to`]];
      if (low && !(row[name] !== null && row[name] >= Number(low))) return false;
      if (high && !(row[name] !== null && row[name] <= Number(high))) return false;
    }
    if (f.role && row.role !== f.role) return false;
    return !state.found || state.found.has(`${row.run}/${row.number}`);
  }

  function select(name, label, values) {
    const element = h("select", { "aria-label": label, "data-filter": name }, h("option", { value: "" }, label), values.map(([value, text]) => h("option", { value }, text)));
    element.value = state.filters[name] ?? "";
    element.addEventListener("change", () => set(name, element.value));
    return element;
  }

  function input(name, label, type = "number") {
    const element = h("input", { type, step: "any", placeholder: label, "aria-label": label, "data-filter": name, class: type === "number" ? "short" : null });
    element.value = state.filters[name] ?? "";
    element.addEventListener("input", () => set(name, element.value));
    return element;
  }

  function between(name) {
    return h("span", { class: "between" }, h("span", {}, name), input(`${name}-from`, "from"), input(`${name}-to`, "to"));
  }

  function set(name, value) {
    state.filters[name] = value;
    state.page = state.at = 0;
    draw();
  }

  function drawBar() {
    const rows = all();
    const stops = count(rows.map((row) => row.stop));
    const roles = count(rows.map((row) => row.role));
    const key = JSON.stringify([stops, roles]);
    if (key === choices && bar.childElementCount) return;
    choices = key;
    const search = h("input", { type: "search", placeholder: "search what was said  ( / )", "data-search": true, "aria-label": "Search what was said" });
    search.value = state.text ?? "";
    search.addEventListener("keydown", (event) => event.key === "Enter" && find(search.value));
    search.addEventListener("search", () => find(search.value));
    search.addEventListener("input", () => {
      clearTimeout(state.timer);
      state.timer = setTimeout(() => find(search.value), 350);
    });
    const pairs = (values) => values.map(([value, times]) => [value, `${value} (${times.toLocaleString("en")})`]);
    const by = h("select", { "aria-label": "Rows", "data-by": true }, h("option", { value: "prompt" }, "a row for each prompt"), h("option", { value: "sample" }, "a row for each sample"));
    by.value = state.by;
    by.addEventListener("change", () => arrange(by.value));
    replace(
      bar,
      search,
      by,
      many() ? select("run", "all runs", app.runs.map((run) => [run.name, run.name])) : null,
      select("set", SETS[""], Object.entries(SETS).slice(1)),
      select("stop", "any stop reason", pairs(stops)),
      roles.length > 0 ? select("role", "any role", pairs(roles)) : null,
      input("prompt", "prompt id", "text"),
      ["reward", "step"].map(between),
      h("button", { type: "button", onclick: clear }, "Clear"),
    );
  }

  function clear() {
    Object.assign(state, { filters: {}, found: null, text: "", page: 0, at: 0 });
    choices = "";
    draw();
  }

  function arrange(by) {
    state.by = by;
    state.page = state.at = 0;
    draw();
  }

  // Rows of the table: what fits, with the samples of a prompt together or apart.
  function arranged() {
    const rows = all();
    const whole = groupsOf(rows);
    const fitting = rows.filter(fits);
    if (state.by === "sample") {
      const idle = new Map([...whole].map(([key, own]) => [key, withoutGradient(own)]));
      return fitting.map((row) => ({ ...row, members: [row], idle: idle.get(keyOf(row)), rank: idle.get(keyOf(row)) ? 1 : 0 }));
    }
    return [...groupsOf(fitting)].map(([key, members]) => asRow(members, whole.get(key)));
  }

  async function find(text) {
    clearTimeout(state.timer);
    if (text === (state.text ?? "")) return;
    state.text = text;
    state.page = state.at = 0;
    if (!text) {
      state.found = null;
      app.status("");
      return draw();
    }
    app.status(`Searching for “${text.slice(0, 40)}” …`);
    const found = new Set();
    let complete = true;
    try {
      for (const run of app.runs) {
        const answer = await app.source.search(run, text);
        answer.numbers.forEach((at) => found.add(`${run.number}/${at}`));
        complete = complete && answer.complete;
      }
    } catch (error) {
      return text === state.text && app.status(`The search failed: ${error.message}`);
    }
    if (text !== state.text) return;
    state.found = found;
    app.status(complete ? "" : "The search ended before all episodes were searched.");
    draw();
  }

  function sort(column) {
    const down = state.sort.name === column.name ? !state.sort.down : Boolean(column.down);
    state.sort = { name: column.name, down };
    state.page = state.at = 0;
    draw();
  }

  function draw() {
    drawBar();
    list = sorted(arranged(), state.sort);
    app.list = list.flatMap(({ members }) => members);
    range = rewardRange(all());
    state.page = Math.min(state.page, Math.max(0, Math.ceil(list.length / PAGE) - 1));
    const rows = list.slice(state.page * PAGE, (state.page + 1) * PAGE);
    state.at = Math.min(state.at, Math.max(0, rows.length - 1));
    const used = COLUMNS.filter(({ name }) => (name === "run" ? many() : name !== "role" || list.some((row) => row.role)));
    const head = used.map((column) => {
      const on = state.sort.name === column.name;
      const label = h("button", { type: "button", title: column.title, "data-sort": column.name, onclick: () => sort(column) }, column.name === "sample" && state.by === "prompt" ? "samples" : column.label, on ? (state.sort.down ? " ▾" : " ▴") : "");
      return h("th", { "aria-sort": on ? (state.sort.down ? "descending" : "ascending") : null, class: kind(column) }, label);
    });
    const body = rows.map((row, i) =>
      h("tr", { tabindex: i === state.at ? 0 : -1, class: row.failure ? "failed" : null, "data-row": i, onclick: (event) => event.target.closest("a") || open(i), onfocus: () => (state.at = i) }, used.map((column) => cell(row, column))),
    );
    const none = app.runs.some((run) => run.rows.length) ? "No episode matches." : "No episodes are stored yet (tracking.episodes_every).";
    replace(table, h("table", { class: "list" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body.length ? body : h("tr", {}, h("td", { colspan: used.length, class: "quiet none" }, none)))));
    const pages = Math.max(1, Math.ceil(list.length / PAGE));
    const reading = app.runs.some((run) => !run.whole || run.pending > 0);
    replace(
      foot,
      h("button", { type: "button", disabled: state.page === 0, onclick: () => turn(-1) }, "‹ previous"),
      h("span", { id: "count" }, `${app.list.length.toLocaleString("en")} of ${all().length.toLocaleString("en")} episodes, page ${state.page + 1} of ${pages}`),
      h("button", { type: "button", disabled: state.page >= pages - 1, onclick: () => turn(1) }, "next ›"),
      reading ? h("span", { class: "quiet" }, "reading on …") : null,
    );
  }

  const kind = ({ text, name }) => (name === "sample" && state.by === "prompt" ? "samples" : name === "prompt" ? "words" : text ? null : "number");

  function cell(row, column) {
    const { name, text } = column;
    const inside = (...content) => h("td", { class: kind(column) }, content);
    if (name === "run") return h("td", { class: `run run-${colourOf(app, app.runs[row.run])}` }, h("span", { class: "swatch" }), app.runs[row.run].name);
    if (name === "prompt") return h("td", { class: "words" }, words(row));
    if (name === "sample" && state.by === "prompt") return inside(dots(row.members, range));
    if (name === "set") return inside(row.set === "eval" ? "held-out" : "training");
    if (name === "stop") return inside(row.failure ? h("span", { class: "badge bad" }, `failed: ${row.failure}`) : row.stop);
    if (name === "reward" && typeof row.reward === "number") return inside(h("b", {}, number(row.reward)));
    return inside(text ? row[name] || "–" : number(row[name]));
  }

  function turn(by) {
    state.page += by;
    state.at = 0;
    draw();
  }

  function open(i) {
    const row = list[state.page * PAGE + i];
    if (row) app.go(row.members[0].link);
  }

  function focus(i) {
    const rows = table.querySelectorAll("tbody tr[data-row]");
    if (!rows.length) return;
    state.at = Math.max(0, Math.min(rows.length - 1, i));
    rows.forEach((row, at) => (row.tabIndex = at === state.at ? 0 : -1));
    rows[state.at].focus();
  }

  return {
    element: h("section", {}, bar, table, foot, chatPanel(app)),
    enter: () => draw(),
    update({ rows }) {
      if (!rows) return;
      const focused = table.contains(document.activeElement);
      draw();
      if (focused) focus(state.at);
    },
    key(event) {
      const focused = table.contains(document.activeElement);
      if (event.key === "j" || event.key === "ArrowDown") focus(focused ? state.at + 1 : state.at);
      else if (event.key === "k" || event.key === "ArrowUp") focus(focused ? state.at - 1 : state.at);
      else if (event.key === "Enter" && document.activeElement?.dataset?.row) open(Number(document.activeElement.dataset.row));
      else return false;
      return true;
    },
  };
}

function count(values) {
  const times = new Map();
  for (const value of values) if (value) times.set(value, (times.get(value) ?? 0) + 1);
  return [...times].sort((a, b) => b[1] - a[1] || natural.compare(a[0], b[0]));
}
