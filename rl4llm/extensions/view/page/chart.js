// A line chart in SVG: lines over steps, time or tokens, smoothed, with the values under the pointer. With the focus, ← and → move
// from point to point.

import { h, inUnit, number, replace } from "./dom.js";
import { scaleOf } from "./lines.js";

const PAD = { left: 52, right: 12, top: 8, bottom: 22 };
const MOST_POINTS = 1200; // per line; with more points only the extremes of each bin are drawn
const FEW = 20; // up to this number, points are drawn as dots; a chart with only such lines is not smoothed

// Exponential mean, corrected for its start: weight 0 leaves values as they are.
export function smoothed(points, weight) {
  if (!weight) return points;
  const means = [0, 0, 0];
  let norm = 0;
  return points.map(([at, value, step, low, high, count]) => {
    norm = weight * norm + (1 - weight);
    [value, low, high].forEach((one, i) => (means[i] = weight * means[i] + (1 - weight) * one));
    const [mean, least, most] = means.map((one) => one / norm);
    return [at, mean, step, least, most, count];
  });
}

export function thinned(points, most = MOST_POINTS) {
  if (points.length <= most) return points;
  const size = Math.ceil((2 * points.length) / most);
  const kept = [];
  for (let start = 0; start < points.length; start += size) {
    let low = start;
    let high = start;
    for (let i = start; i < Math.min(points.length, start + size); i++) {
      if (points[i][1] < points[low][1]) low = i;
      if (points[i][1] > points[high][1]) high = i;
    }
    kept.push(points[Math.min(low, high)]);
    if (low !== high) kept.push(points[Math.max(low, high)]);
  }
  return kept;
}

// Round numbers between two bounds.
export function ticks(low, high, count = 4) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw) ?? 10 * power;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  return found;
}

// The point whose place is nearest.
function nearest(points, at) {
  let low = 0;
  let high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < at) low = middle + 1;
    else high = middle;
  }
  return low > 0 && at - points[low - 1][0] <= points[low][0] - at ? points[low - 1] : points[low];
}

// `data()` gives {series: [{colour, name, points}], smoothing, axis}, with points of `pointsOf`.
// `entry` is the glossary's of the metric, if it has one: {meaning, unit, healthy}.
export function chart(title, data, entry) {
  const svg = h("svg", { class: "plot", tabindex: 0, role: "img", "aria-label": title });
  const tip = h("div", { class: "tip", hidden: true });
  const id = `meaning-${title.replace(/\W/g, "_")}`;
  const meaning = entry ? h("span", { class: "meaning", role: "tooltip", id }, entry.meaning, entry.healthy ? ` Healthy: ${entry.healthy}.` : null) : null;
  const name = h("span", { class: "name", tabindex: entry ? 0 : null, "aria-describedby": entry ? id : null }, title);
  const caption = h("figcaption", {}, name, entry ? h("span", { class: "quiet" }, ` ${entry.unit}`) : null, meaning);
  const box = h("figure", { class: "chart", "data-metric": title }, caption, h("div", { class: "plot-box" }, svg, tip));
  const told = (value, digits) => inUnit(value, entry?.unit, digits);
  let shape = null;
  let cursor = null;

  function draw() {
    const { series, smoothing, axis } = data();
    const width = Math.max(240, svg.clientWidth || 400);
    const height = svg.clientHeight || 180;
    const many = series.some(({ points }) => points.length > FEW);
    const lines = series
      .filter(({ points }) => points.length)
      .map((line) => ({ ...line, raw: line.points, smooth: smoothed(line.points, many ? smoothing : 0) }));
    const all = lines.flatMap(({ raw, smooth }) => (smooth === raw ? [raw] : [raw, smooth])).flat();
    const places = all.map(([at]) => at);
    const [from, to] = [least(places), most(places)];
    const seen = all.flatMap(([, value, , low, high]) => [value, low, high]);
    if (!seen.length) {
      shape = null;
      return replace(svg, h("text", { x: width / 2, y: height / 2, class: "axis", "text-anchor": "middle" }, "no values here"));
    }
    let [low, high] = [least(seen), most(seen)];
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
    [low, high] = [low === 0 && high === 0 ? 0 : low - margin, high + margin]; // a series of zeros is drawn at the bottom
    const x = (at) => PAD.left + ((at - from) / (to - from || 1)) * (width - PAD.left - PAD.right);
    const y = (value) => height - PAD.bottom - ((value - low) / (high - low)) * (height - PAD.top - PAD.bottom);
    const at = (place) => from + ((place - PAD.left) / (width - PAD.left - PAD.right)) * (to - from);
    if (shape?.axis !== axis) hide();
    const scaled = scaleOf(axis, to);
    shape = { lines, x, y, at, from, to, width, height, axis, told: scaled.told };
    const horizontal = ticks(low, high).map((value) => h("g", {}, h("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(value), y2: y(value) }), h("text", { class: "axis", x: PAD.left - 6, y: y(value) + 4, "text-anchor": "end" }, told(value, 3))));
    const vertical = ticks(from / scaled.size, to / scaled.size, Math.max(2, Math.floor(width / 110)))
      .filter((value) => axis !== "step" || Number.isInteger(value))
      .map((value) => h("text", { class: "axis", x: x(value * scaled.size), y: height - 5, "text-anchor": "middle" }, scaled.told(value * scaled.size)));
    const path = (points) => points.map(([at, value], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const area = (points) => `${path(points.map(([at, , , , high]) => [at, high]))}${path(points.map(([at, , , low]) => [at, low]).reverse()).replace("M", "L")}Z`;
    const curves = lines.map(({ colour, raw, smooth }) => {
      const points = thinned(raw);
      const band = smooth.some(([, , , , , count]) => count > 1) ? h("path", { class: "band", d: area(thinned(smooth)) }) : null;
      const faint = smooth !== raw;
      const dots = points.length <= FEW ? points.map(([at, value]) => h("circle", { cx: x(at), cy: y(value), r: 2.6 })) : null;
      return h("g", { class: `line run-${colour}` }, band, h("path", { class: faint ? "faint" : "main", d: path(points) }), dots, faint ? h("path", { class: "main", d: path(thinned(smooth)) }) : null);
    });
    replace(
      svg,
      horizontal,
      vertical,
      curves,
      h("g", { class: "cursor" }),
    );
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    if (cursor !== null) point(cursor);
  }

  function point(at) {
    if (!shape) return;
    const everything = shape.lines.flatMap(({ raw }) => (raw.length ? [nearest(raw, at)] : []));
    const [place, , step] = everything.reduce((best, one) => (Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best));
    cursor = place;
    const rows = shape.lines.map((line) => {
      const [own, value, step, low, high, count] = nearest(line.raw, place);
      return { ...line, own, value, step, low, high, count, mean: nearest(line.smooth, place)[1] };
    });
    const here = rows.filter(({ own }) => own === place);
    replace(
      svg.querySelector(".cursor") ?? svg,
      h("line", { x1: shape.x(place), x2: shape.x(place), y1: PAD.top, y2: shape.height - PAD.bottom }),
      here.filter(({ value }) => Number.isFinite(shape.y(value))).map(({ colour, value }) => h("circle", { class: `line run-${colour}`, cx: shape.x(place), cy: shape.y(value), r: 4 })),
    );
    const quiet = (text) => h("span", { class: "quiet" }, text);
    replace(
      tip,
      h("b", {}, `step ${number(step)}`),
      shape.axis === "step" ? null : quiet(`, ${shape.told(place)}`),
      rows.map(({ colour, name, own, value, step, low, high, count, mean, raw, smooth }) =>
        h(
          "div",
          { class: `run run-${colour}` },
          h("span", { class: "swatch" }),
          rows.length > 1 ? h("span", { class: "tip-name" }, name) : null,
          h("b", {}, told(value)),
          count > 1 ? quiet(` ${told(low)} to ${told(high)} of ${count}`) : null,
          smooth !== raw ? quiet(` smoothed ${told(mean)}`) : null,
          own !== place ? quiet(` at step ${number(step)}`) : null,
        ),
      ),
    );
    tip.hidden = false;
    const left = (shape.x(place) / shape.width) * svg.clientWidth;
    tip.style.setProperty("left", `${left < svg.clientWidth / 2 ? left + 14 : left - 14 - tip.offsetWidth}px`);
    const high = here.length > 0 && here.every(({ value }) => shape.y(value) < shape.height / 2);
    tip.style.setProperty("top", `${high ? svg.clientHeight - PAD.bottom - tip.offsetHeight - 4 : PAD.top}px`);
  }

  function hide() {
    cursor = null;
    tip.hidden = true;
    const group = svg.querySelector(".cursor");
    if (group) replace(group);
  }

  const place = (event) => ((event.clientX - svg.getBoundingClientRect().left) / svg.clientWidth) * (shape?.width ?? 1);
  svg.addEventListener("pointermove", (event) => shape && point(shape.at(place(event))));
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    if (!shape || !/^Arrow(Left|Right)$/.test(event.key)) return;
    const places = [...new Set(shape.lines.flatMap(({ raw }) => raw.map(([at]) => at)))].sort((a, b) => a - b);
    const now = cursor === null ? -1 : places.indexOf(cursor);
    point(places[Math.min(places.length - 1, Math.max(0, event.key === "ArrowRight" ? now + 1 : now < 0 ? places.length - 1 : now - 1))]);
    event.preventDefault();
    event.stopPropagation();
  });
  return { element: box, draw };
}

function least(values) {
  return values.reduce((best, value) => (value < best ? value : best), Infinity);
}

function most(values) {
  return values.reduce((best, value) => (value > best ? value : best), -Infinity);
}
