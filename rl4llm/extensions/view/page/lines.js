// The lines of a chart, and what they are drawn over. A line is a run, or a band: the seeds of one configuration.

import { number } from "./dom.js";

const PHASES = ["time/step", "time/evaluate", "time/checkpoint"]; // their sum is the time of a run
const UNITS = [["h", 3600], ["min", 60], ["s", 1]];
export const AXES = [["step", "steps"], ["seconds", "time"], ["tokens", "tokens"]];

// The places of each step on each axis: seconds of training, and tokens that were sampled, or read where nothing is sampled.
export function axesOf(steps) {
  const axes = { step: new Map(), seconds: new Map(), tokens: new Map() };
  let [seconds, tokens] = [0, 0];
  for (const [step, values] of [...steps].sort((a, b) => a[0] - b[0])) {
    seconds += PHASES.reduce((sum, phase) => sum + (values[phase] ?? 0), 0);
    tokens += (values["tokens/s"] ?? 0) * (values["time/step"] ?? 0);
    axes.step.set(step, step);
    if (seconds > 0 || step === 0) axes.seconds.set(step, seconds);
    if (tokens > 0 || step === 0) axes.tokens.set(step, tokens);
  }
  return axes;
}

// How to write a place on an axis that ends at `most`; `size` is what ticks are multiples of.
export function scaleOf(axis, most) {
  if (axis === "seconds") {
    const [unit, size] = UNITS.find(([, size]) => most >= 2 * size) ?? UNITS.at(-1);
    return { size, told: (value) => `${number(value / size, 3)} ${unit}` };
  }
  if (axis === "tokens") return { size: 1, told: (value) => `${value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 })}` };
  return { size: 1, told: (value) => value.toLocaleString("en") };
}

// The lines of the runs that are shown.
export function linesOf(app) {
  const bands = new Map();
  for (const run of app.runs.filter((_, i) => !app.hidden.has(i))) {
    const band = app.bands ? run.about.band : run.number;
    bands.set(band, [...(bands.get(band) ?? []), run]);
  }
  return [...bands.values()].map((runs) => ({ colour: colourOf(app, runs[0]), runs, name: runs.length > 1 ? `${runs[0].about.band_name} (${runs.length} seeds)` : runs[0].name }));
}

// The number of a run's colour: all seeds of a band have that of the first.
export function colourOf(app, run) {
  return (app.bands ? run.about.band : run.number) % 8;
}

export function hasBands(app) {
  return app.runs.some((run) => run.about.band !== run.number);
}

// The points of a line: [place, mean, step, lowest, highest, number of runs], at each step over the runs that have it.
export function pointsOf({ runs }, name, axis) {
  const found = new Map();
  for (const run of runs) {
    const place = run.axes[axis];
    for (const [step, value] of run.points(name)) {
      if (!place.has(step)) continue;
      if (!found.has(step)) found.set(step, { places: [], values: [] });
      found.get(step).places.push(place.get(step));
      found.get(step).values.push(value);
    }
  }
  return [...found]
    .map(([step, { places, values }]) => [mean(places), mean(values), step, Math.min(...values), Math.max(...values), values.length])
    .sort((a, b) => a[2] - b[2]);
}

export function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}
