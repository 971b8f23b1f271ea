// The rewards of each step as a strip of histograms: the darker a cell, the more of the step's episodes have this reward.

import { h, number, replace } from "./dom.js";
import { scaleOf } from "./lines.js";

const PAD = { left: 52, right: 12, top: 8, bottom: 22 };

// `data()` gives {run, name, colour, axis}; `zoom` is that of the charts.
export function rewardStrip(data, zoom) {
  const svg = h("svg", { class: "plot", role: "img" });
  const title = h("span", { class: "name" });
  const element = h("figure", { class: "chart rewards" }, h("figcaption", {}, title, h("span", { class: "quiet" }, " share of the stored episodes of a step")), h("div", { class: "plot-box" }, svg));

  function draw() {
    const { run, name, colour, axis } = data();
    const { bins, columns } = run.story?.rewards ?? { bins: [], columns: [] };
    const places = placesOf(columns, run.axes[axis]);
    element.hidden = places.length < 2;
    if (element.hidden) return;
    title.textContent = name;
    svg.setAttribute("aria-label", name);
    const [width, height] = [Math.max(240, svg.clientWidth || 400), svg.clientHeight || 180];
    const [from, to] = zoom.range ?? [places[0][0], places.at(-1)[1]];
    const x = (place) => PAD.left + ((Math.min(to, Math.max(from, place)) - from) / (to - from || 1)) * (width - PAD.left - PAD.right);
    const tall = (height - PAD.top - PAD.bottom) / bins.length;
    const top = (bin) => height - PAD.bottom - (bin + 1) * tall;
    const cells = places.flatMap(([start, end, [first, last, counts]]) => {
      const all = counts.reduce((sum, count) => sum + count, 0);
      const steps = first === last ? `step ${number(first)}` : `steps ${number(first)} to ${number(last)}`;
      if (end <= from || start >= to) return [];
      return counts.map((count, bin) => {
        const about = `${steps}: reward ${label(bins[bin])}, ${number(count)} of ${number(all)}`;
        return count ? h("rect", { x: x(start), width: Math.max(0.5, x(end) - x(start)), y: top(bin), height: tall, "fill-opacity": (count / all).toFixed(3) }, h("title", {}, about)) : null;
      });
    });
    const every = Math.ceil(bins.length / 8);
    const scaled = scaleOf(axis, to);
    const labels = bins.map((bin, i) => (i % every ? null : h("text", { class: "axis", x: PAD.left - 6, y: top(i) + tall / 2 + 4, "text-anchor": "end" }, number(bin[0], 3))));
    const ends = [[from, "start"], [to, "end"]].map(([place, anchor]) => h("text", { class: "axis", x: x(place), y: height - 5, "text-anchor": anchor }, scaled.told(axis === "step" ? Math.round(place) : place)));
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    replace(svg, labels, h("g", { class: `strip run-${colour}` }, cells), ends);
  }

  return { element, draw };
}

// Where each column begins and ends on an axis, without those whose steps it does not have: a column begins where the one
// before ends, and the first is as wide as the second.
function placesOf(columns, axis) {
  const known = columns.filter(([, last]) => axis.has(last));
  const ends = known.map(([, last]) => axis.get(last));
  const first = Math.max(0, 2 * ends[0] - (ends[1] ?? ends[0] + 1));
  return known.map((column, i) => [i ? ends[i - 1] : first, ends[i], column]);
}

function label([low, high]) {
  return low === high ? number(low) : `${number(low)} to ${number(high)}`;
}
