// The page: tabs, keys, and updates of runs that still train.

import { configView } from "./config.js";
import { curvesView } from "./curves.js";
import { h, isTyping, number, replace, visible } from "./dom.js";
import { episodeView } from "./episode.js";
import { episodesView } from "./episodes.js";
import { colourOf } from "./lines.js";
import { openSource } from "./source.js";

const EVERY_MS = 2000;
const TABS = [
  ["curves", "Curves"],
  ["episodes", "Episodes"],
  ["config", "Configuration"],
];
const KEYS = [
  ["1 2 3", "curves, episodes, configuration"],
  ["/", "search or filter"],
  ["j k, ↓ ↑", "next and previous row of a list"],
  ["Enter", "open the episode"],
  ["n p", "next and previous episode of the list"],
  ["← →", "next and previous token, from the first sampled one, or point of a curve that has the focus"],
  ["c", "what tokens are coloured by"],
  ["Esc", "back to the list"],
  ["?", "these keys"],
];

if (new URLSearchParams(location.search).has("token")) {
  history.replaceState(null, "", location.pathname + location.hash); // the cookie stores it from now on
}
const app = { source: openSource(), runs: [], hidden: new Set(), bands: true, view: null, list: [], go, status, setBands };
const top = document.getElementById("top");
const main = document.getElementById("main");
const footer = document.getElementById("status");
const help = h(
  "dialog",
  { "aria-label": "Keys" },
  h("h2", {}, "Keys"),
  h("table", {}, KEYS.map(([keys, what]) => h("tr", {}, h("td", {}, h("kbd", {}, keys)), h("td", {}, what)))),
  h("form", { method: "dialog" }, h("button", {}, "Close")),
);

function go(route) {
  location.hash = route;
}

// Seeds of one configuration as one band of curves, or each run as a line.
function setBands(bands) {
  app.bands = bands;
  drawTop(app.current);
  app.view?.update?.({ metrics: true, rows: false });
}

function status(text) {
  replace(footer, text);
}

function drawTop(route) {
  const tabs = TABS.map(([name, label], i) =>
    h("a", { href: `#/${name}`, "aria-current": route === name || (name === "episodes" && route === "episode") ? "page" : null, title: `key ${i + 1}` }, label),
  );
  const runs = app.runs.map((run, i) => {
    const latest = Math.max(0, ...run.steps.keys());
    const state = run.about.running && app.source.live ? "training" : "";
    const steps = run.about.max_steps ? `step ${latest} of ${run.about.max_steps}` : `step ${latest}`;
    const box = h("input", { type: "checkbox", "aria-label": `show ${run.name}` });
    box.checked = !app.hidden.has(i);
    box.addEventListener("change", () => {
      if (box.checked) app.hidden.delete(i);
      else app.hidden.add(i);
      app.view?.update?.({ metrics: true, rows: true });
    });
    return h(
      "label",
      { class: `run run-${colourOf(app, run)}`, title: run.about.path },
      app.runs.length > 1 ? box : null,
      h("span", { class: "swatch" }),
      h("b", {}, run.name),
      h("span", { class: "quiet" }, steps),
      state ? h("span", { class: "badge live" }, state) : null,
    );
  });
  const warnings = app.runs.flatMap((run) => run.about.warnings.map((text) => h("p", { class: "warning" }, `${run.name}: ${text}`)));
  const alerts = app.runs.flatMap((run) => run.about.alerts.filter((alert) => alert.until === null).map((alert) => alertLine(run, alert)));
  replace(
    top,
    h(
      "div",
      { class: "bar" },
      h("strong", { class: "brand" }, "rl4llm"),
      h("nav", { "aria-label": "Views" }, tabs),
      h("div", { class: "runs" }, runs),
      h(
        "div",
        { class: "tools" },
        h("button", { type: "button", onclick: () => help.showModal(), title: "key ?", "aria-label": "Keys" }, "?"),
      ),
    ),
    warnings,
    alerts,
  );
}

function alertLine(run, { name, since, seen, why, metric, look_at: keys }) {
  const more = h("span", { class: "quiet" }, `Look at ${keys}.`, metric ? ` ${metric}` : null);
  const facts = [h("b", {}, `${run.name}: ${name}`), ` since step ${since}: ${seen}. ${why} `, more];
  return h("p", { class: "warning", role: "alert", "data-alert": name }, facts);
}

const VIEWS = { curves: curvesView, episodes: episodesView, episode: episodeView, config: configView };

function route() {
  const [name = "curves", ...rest] = location.hash.replace(/^#\//, "").split("/");
  const view = VIEWS[name] ? name : "curves";
  const remain = app.current === view && app.view?.enter;
  app.current = view;
  drawTop(view);
  document.title = visible(`${app.runs.map((run) => run.name).join(", ")} – rl4llm`);
  if (remain) return app.view.enter(rest);
  app.view?.leave?.();
  app.view = VIEWS[view](app, rest);
  replace(main, app.view.element);
  app.view.enter?.(rest);
  window.scrollTo(0, app.view.scroll ?? 0);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.key === "Escape" && isTyping(event)) return event.target.blur();
  if (isTyping(event)) return;
  const tab = TABS[Number(event.key) - 1];
  if (tab) go(`/${tab[0]}`);
  else if (event.key === "?") help.showModal();
  else if (event.key === "/") document.querySelector("[data-search]")?.focus();
  else if (!app.view?.key?.(event)) return;
  event.preventDefault();
});

async function follow() {
  let failed = false;
  for (;;) {
    let more = false;
    if (!document.hidden) {
      for (const run of app.runs) {
        try {
          const changed = await app.source.update(run);
          more = more || changed.more;
          if (changed.metrics || changed.rows) {
            drawTop(app.current);
            app.view?.update?.(changed);
          }
          if (failed) status("");
          failed = false;
        } catch (error) {
          failed = true;
          status(`No response from the server (${error.message}). Is rl4llm view still running?`);
        }
      }
    }
    if (!app.source.live) return;
    await new Promise((resolve) => setTimeout(resolve, more ? 0 : EVERY_MS));
    if (!more && !document.hidden && !failed) await refresh().catch(() => {});
  }
}

// The description of a run; alerts, and whether it still trains, are shown at once.
async function refresh() {
  const told = () => JSON.stringify(app.runs.map(({ about }) => [about.alerts, about.running, about.warnings]));
  const before = told();
  await app.source.refreshAbout();
  if (told() === before) return;
  await Promise.all(app.runs.map((run) => app.source.refreshStory(run)));
  drawTop(app.current);
  app.view?.update?.({ metrics: true, rows: false });
}

async function start() {
  document.body.append(help);
  try {
    app.runs = await app.source.open();
    await Promise.all(app.runs.map((run) => app.source.update(run)));
  } catch (error) {
    replace(main, h("p", { class: "warning" }, `The runs cannot be read: ${error.message}`));
    return;
  }
  addEventListener("hashchange", route);
  route();
  const sum = (count) => app.runs.reduce((total, run) => total + count(run), 0);
  const [kept, all] = [sum((run) => run.rows.length), sum((run) => run.all)];
  if (kept < all) status(`This file contains ${number(kept)} of ${number(all)} episodes: some of each step, and the extremes.`);
  document.documentElement.dataset.ready = "yes";
  follow();
}

start();
