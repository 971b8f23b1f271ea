// The curves of all metrics: the most important ones on top, the others by family.

import { chart } from "./chart.js";
import { csvOf, download } from "./csv.js";
import { h, replace } from "./dom.js";
import { AXES, colourOf, hasBands, linesOf, pointsOf } from "./lines.js";
import { isFlat, isNoise, merged } from "./order.js";
import { rewardStrip } from "./rewards.js";
import { storyView } from "./story.js";

const FIRST = [
  "eval/accuracy", "eval/reward/mean", "reward/mean", "accuracy", "eval/loss", "loss", "entropy", "surprise", "kl", "mismatch/mean", "mismatch/max", "clip_fraction",
  "grad_norm", "completion_length/mean", "truncated", "groups/zero_spread", "failures", "tokens/s",
];
const ALWAYS = new Set(["eval/accuracy", "reward/mean"]); // on top, even if flat
const LOSSES = new Set(["loss", "policy_loss"]); // with one update per rollout their value is 0 up to rounding
const ROUNDING = 1e-5;
const LAST = "flat or noisy";

export function curvesView(app) {
  const settings = { smoothing: 0.6, log: false, filter: "", axis: "step" };
  const story = storyView(app);
  const zoom = { range: null, change: (range) => ((zoom.range = range), (all.hidden = !range), drawAll()) };
  const charts = new Map();
  const stripOf = new Map();
  const opened = new Set();
  const grid = h("div", { class: "charts" });
  const count = h("summary", {});
  const list = h("ul", {});
  const past = h("details", { class: "past", hidden: true }, count, list);
  const rest = h("div", {});
  const filter = h("input", { type: "search", placeholder: "filter metrics  ( / )", "data-search": true, "aria-label": "Filter metrics" });
  const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, id: "smoothing" });
  const shown = h("output", { for: "smoothing" });
  const log = h("input", { type: "checkbox", id: "log" });
  const all = h("button", { type: "button", hidden: true, onclick: () => zoom.change(null) }, "Show all");
  const axis = h("select", { id: "axis" }, AXES.map(([value, label]) => h("option", { value }, label)));
  const bands = h("input", { type: "checkbox", id: "bands" });
  const save = h("button", { type: "button", id: "csv", onclick: () => download(csvOf(runs(), names().filter(matches)), "curves.csv") }, "Download CSV");
  const strips = h("div", { class: "strips" });
  bands.checked = app.bands;
  slider.value = settings.smoothing;
  filter.addEventListener("input", () => ((settings.filter = filter.value.toLowerCase()), layOut()));
  slider.addEventListener("input", () => ((settings.smoothing = Number(slider.value)), drawAll()));
  log.addEventListener("change", () => ((settings.log = log.checked), drawAll()));
  axis.addEventListener("change", () => ((settings.axis = axis.value), zoom.change(null)));
  bands.addEventListener("change", () => app.setBands(bands.checked));

  function runs() {
    return app.runs.filter((_, i) => !app.hidden.has(i));
  }

  function names() {
    return [...new Set(app.runs.flatMap((run) => [...run.metricNames()]))].sort();
  }

  function matches(name) {
    return name.toLowerCase().includes(settings.filter);
  }

  function of(name) {
    if (!charts.has(name)) {
      const data = () => ({ ...settings, series: linesOf(app).map((line) => ({ ...line, points: pointsOf(line, name, settings.axis) })) });
      charts.set(name, chart(name, data, zoom, app.runs.map((run) => run.glossary.get(name)).find(Boolean)));
    }
    return charts.get(name);
  }

  function layOut() {
    const found = names().filter(matches);
    const important = FIRST.filter((name) => found.includes(name));
    const lines = (name) => app.runs.map((run) => run.points(name));
    const kept = settings.filter ? new Map(found.map((name) => [name, [name]])) : merged([...important, ...found.filter((name) => !FIRST.includes(name))], lines);
    for (const [name, same] of kept) of(name).alsoCalled(same.filter((other) => other !== name));
    const quiet = (name) => !ALWAYS.has(name) && (isFlat(lines(name), LOSSES.has(name) ? ROUNDING : 0) || isNoise(lines(name)));
    // the metrics of another program may have none of these names
    const first = settings.filter ? found : (important.length ? important : found).filter((name) => kept.has(name) && !quiet(name));
    const families = new Map();
    if (!settings.filter) {
      const rest = [...kept.keys()].filter((name) => !first.includes(name));
      for (const name of rest.filter((name) => !quiet(name)).sort()) {
        const family = name.includes("/") ? name.slice(0, name.indexOf("/")) : "more";
        families.set(family, [...(families.get(family) ?? []), name]);
      }
      if (rest.some(quiet)) families.set(LAST, rest.filter(quiet));
    }
    const hint = settings.filter ? "No metric matches." : app.runs.some((run) => run.steps.size) ? null : "No step is logged yet. Curves appear here after the first step.";
    replace(grid, first.length ? first.map((name) => of(name).element) : h("p", { class: "quiet" }, hint), settings.filter ? null : strips);
    replace(rest, [...families].map(([family, members]) => group(family, members)));
    drawAll();
  }

  function group(family, members) {
    const inside = h("div", { class: "charts" });
    const fill = () => replace(inside, members.map((name) => of(name).element));
    const details = h("details", { class: "family", open: opened.has(family) }, h("summary", {}, family, h("span", { class: "quiet" }, ` ${members.length}`)), inside);
    details.addEventListener("toggle", () => {
      if (!details.open) return opened.delete(family);
      opened.add(family);
      fill();
      members.forEach((name) => of(name).draw());
    });
    if (opened.has(family)) fill();
    return details;
  }

  // Alerts that are over; current ones are on top of every page.
  function drawAlerts() {
    const over = runs().flatMap((run) => run.about.alerts.filter((alert) => alert.until !== null).map((alert) => ({ run, alert })));
    count.textContent = `Alerts that are over: ${over.length}`;
    past.hidden = over.length === 0;
    replace(
      list,
      over.map(({ run, alert }) =>
        h("li", { class: `run-${colourOf(app, run)}` }, h("span", { class: "swatch" }), h("b", {}, alert.name), ` from step ${alert.since} to ${alert.until}: ${alert.seen}. `, h("span", { class: "quiet" }, alert.why)),
      ),
    );
  }

  function drawAll() {
    drawAlerts();
    shown.textContent = Number(slider.value).toFixed(2);
    for (const { element, draw } of charts.values()) if (element.isConnected) draw();
    drawStrips();
    for (const option of axis.options) option.disabled = !app.runs.some((run) => run.axes[option.value].size);
    bands.parentElement.hidden = !hasBands(app);
  }

  function drawStrips() {
    replace(strips, runs().map((run) => strip(run).element));
    runs().forEach((run) => strip(run).draw());
  }

  function strip(run) {
    if (!stripOf.has(run)) {
      const name = () => `rewards${app.runs.length > 1 ? ` of ${run.name}` : ""}`;
      stripOf.set(run, rewardStrip(() => ({ run, name: name(), colour: colourOf(app, run), axis: settings.axis }), zoom));
    }
    return stripOf.get(run);
  }

  let known = 0;
  const observer = new ResizeObserver(drawAll);
  return {
    element: h(
      "section",
      {},
      story.element,
      h("div", { class: "controls" }, filter, h("label", { for: "smoothing" }, "smoothing ", slider, " ", shown), h("label", { for: "log" }, log, " log scale"), h("label", { for: "axis" }, "over ", axis), h("label", { for: "bands" }, bands, " seeds as bands"), all, save, h("span", { class: "quiet" }, "drag to zoom, double-click to see all")),
      past,
      grid,
      rest,
    ),
    enter() {
      known = names().length;
      story.draw();
      layOut();
      observer.observe(grid);
    },
    leave: () => observer.disconnect(),
    update({ metrics }) {
      story.draw();
      if (!metrics) return drawStrips();
      if (names().length !== known) layOut();
      else drawAll();
      known = names().length;
    },
  };
}
