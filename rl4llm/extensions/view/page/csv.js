// The curves as a table for other programs: a row for each run and step, with what it took until then.

import { h } from "./dom.js";

export function csvOf(runs, names) {
  const rows = runs.flatMap((run) =>
    [...run.steps]
      .sort((a, b) => a[0] - b[0])
      .map(([step, values]) => [run.name, step, run.axes.seconds.get(step), run.axes.tokens.get(step), ...names.map((name) => values[name])]),
  );
  return [["run", "step", "seconds", "tokens", ...names], ...rows].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

export function download(text, name) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000); // the browser may still be reading it
}

function cell(value) {
  const text = String(value ?? "");
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
