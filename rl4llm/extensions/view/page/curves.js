// The curves of all metrics: the most important ones on top, the others by family.

import { chart } from "./chart.js";
import { compareView } from "./compare.js";
import { csvOf, download } from "./csv.js";
import { h, replace } from "./dom.js";
import { AXES, hasBands, linesOf, pointsOf } from "./lines.js";
import { storyView } from "./story.js";

const FIRST = [
  "eval/accuracy", "eval/reward/mean", "reward/mean", "accuracy", "eval/loss", "loss", "entropy", "surprise", "kl", "mismatch/mean", "mismatch/max", "clip_fraction",
  "grad_norm", "completion_length/mean", "truncated", "groups/zero_spread", "failures", "tokens/s",
];

export function curvesView(app) {
  const settings = { smoothing: 0.6, filter: "", axis: "step" };
  const story = storyView(app);
  const compare = compareView(app);
  const several = app.runs.length > 2; // whose headlines would push the curves off the screen
  const charts = new Map();
  const opened = new Set();
  const grid = h("div", { class: "charts" });
  const rest = h("div", {});
  const filter = h("input", { type: "search", placeholder: "filter metrics  ( / )", "data-search": true, "aria-label": "Filter metrics" });
  const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smoothing, id: "smoothing" });
  const axis = h("select", { id: "axis" }, AXES.map(([value, label]) => h("option", { value }, label)));
  const bands = h("input", { type: "checkbox", id: "bands" });
  const save = h("button", { type: "button", id: "csv", onclick: () => download(csvOf(runs(), names().filter(matches)), "curves.csv") }, "Download CSV");
  bands.checked = app.bands;
  filter.addEventListener("input", () => ((settings.filter = filter.value.toLowerCase()), layOut()));
  slider.addEventListener("input", () => ((settings.smoothing = Number(slider.value)), drawAll()));
  axis.addEventListener("change", () => ((settings.axis = axis.value), drawAll()));
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
      charts.set(name, chart(name, data, app.runs.map((run) => run.glossary.get(name)).find(Boolean)));
    }
    return charts.get(name);
  }

  function layOut() {
    const listed = names().filter(matches);
    const important = FIRST.filter((name) => listed.includes(name));
    // the metrics of another program may have none of these names
    const first = settings.filter || !important.length ? listed : important;
    const families = new Map();
    for (const name of listed.filter((name) => !first.includes(name))) {
      const family = name.includes("/") ? name.slice(0, name.indexOf("/")) : "more";
      families.set(family, [...(families.get(family) ?? []), name]);
    }
    const hint = settings.filter ? "No metric matches." : "No step is logged yet. Curves appear here after the first step.";
    replace(grid, first.length ? first.map((name) => of(name).element) : h("p", { class: "quiet" }, hint));
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

  function drawAll() {
    for (const { element, draw } of charts.values()) if (element.isConnected) draw();
    for (const option of axis.options) option.disabled = !app.runs.some((run) => run.axes[option.value].size);
    bands.parentElement.hidden = !hasBands(app);
  }

  let known = 0;
  const observer = new ResizeObserver(drawAll);
  return {
    element: h(
      "section",
      {},
      several ? null : story.element,
      compare.element,
      h("div", { class: "controls" }, filter, h("label", { for: "smoothing" }, "smoothing ", slider), h("label", { for: "axis" }, "over ", axis), h("label", { for: "bands" }, bands, " seeds as bands"), save),
      grid,
      rest,
      several ? story.element : null,
    ),
    enter() {
      known = names().length;
      story.draw();
      compare.draw();
      layOut();
      observer.observe(grid);
    },
    leave: () => observer.disconnect(),
    update({ metrics }) {
      story.draw();
      compare.draw();
      if (!metrics) return;
      if (names().length !== known) layOut();
      else drawAll();
      known = names().length;
    },
  };
}
