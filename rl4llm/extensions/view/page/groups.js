// The samples of one prompt in one step, as one row of a list, with a dot for each sample.

import { h, number } from "./dom.js";

export const keyOf = (row) => `${row.run}/${row.file}/${row.role}/${row.prompt}`;

export function groupsOf(rows) {
  const groups = new Map();
  for (const row of rows) {
    const key = keyOf(row);
    if (groups.has(key)) groups.get(key).push(row);
    else groups.set(key, [row]);
  }
  return groups;
}

// Whether no sample of a group trained: no difference between their rewards leaves no credit.
export function withoutGradient(whole) {
  const done = whole.filter((row) => !row.failure);
  if (done.length < 2 || done[0].set !== "step") return false;
  if (done.every((row) => typeof row.more.credit === "number")) return done.every((row) => row.more.credit === 0);
  return done.every((row) => row.mismatch === null && row.reward === done[0].reward);
}

// A group as a row with the same fields as a sample: means, and the largest mismatch. `whole` has the samples that a filter left out.
export function asRow(members, whole) {
  const best = members.reduce((one, row) => ((row.reward ?? -Infinity) > (one.reward ?? -Infinity) ? row : one));
  const mean = (name) => {
    const values = members.map((row) => row[name]).filter((value) => typeof value === "number");
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  };
  const worst = members.map((row) => row.mismatch).filter((value) => typeof value === "number");
  const idle = withoutGradient(whole);
  const stops = [...new Set(members.map((row) => row.stop).filter(Boolean))];
  return {
    ...best, members, idle, number: members[0].number, reward: mean("reward"), turns: mean("turns"), tokens: mean("tokens"),
    mismatch: worst.length ? worst.reduce((one, value) => Math.max(one, value)) : null, stop: stops.join(", "),
    failure: members.every((row) => row.failure) ? members[0].failure : "", failed: members.filter((row) => row.failure).length,
    odd: members.find((row) => row.odd)?.odd ?? "", sample: members.length, rank: idle ? 2 : members.length > 1 ? 0 : 1,
  };
}

export function rewardRange(rows) {
  let [low, high] = [Infinity, -Infinity];
  for (const { reward } of rows) {
    if (typeof reward !== "number") continue;
    low = Math.min(low, reward);
    high = Math.max(high, reward);
  }
  return [low, high];
}

// Full for the highest reward, empty for the lowest, a cross for a failed sample.
export function dots(members, [low, high]) {
  const told = (row) => `sample ${row.sample ?? "?"}: ${row.failure ? `failed, ${row.failure}` : `reward ${number(row.reward)}, ${row.stop}`}`;
  const fill = (row) => (typeof row.reward === "number" && high > low ? Math.round((100 * (row.reward - low)) / (high - low)) : typeof row.reward === "number" ? 100 : 0);
  const dot = (row) =>
    h("a", { class: `dot${row.failure ? " cross" : ""}`, href: `#${row.link}`, tabindex: -1, title: told(row), "aria-label": told(row), style: { "--fill": `${fill(row)}%` } }, row.failure ? "×" : null);
  return h("span", { class: "dots", style: { "--count": members.length } }, members.map(dot));
}

// First lines of question and answer, and what is to be noticed.
export function words(row) {
  return [
    h("div", { class: "question", title: `prompt ${row.prompt}` }, row.question || row.prompt || "–"),
    h("div", { class: "answer" }, row.answer || (row.failure ? "" : "(empty)")),
    row.idle || row.odd ? h("div", { class: "marks" }, row.idle ? h("span", { class: "badge", title: "The credits of all samples are 0, so nothing is learned from this group." }, "no gradient") : null, row.odd ? h("span", { class: "badge bad" }, row.odd) : null) : null,
  ];
}
