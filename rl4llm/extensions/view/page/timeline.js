// The last steps of an asynchronous run as bars: who waited for whom. A bar is as long as its step took.

import { h, inUnit, number } from "./dom.js";

const LAST = 12;
const PHASES = { rollout: "the trainer waits for episodes", prepare: "prepares", update: "updates", publish: "publishes", verify: "verifies" };

export function timeline(run) {
  const of = (name) => new Map(run.points(name));
  const [ages, steps, idle] = [of("staleness"), of("time/step"), of("fleet/idle")];
  const shown = [...ages.keys()].filter((step) => steps.get(step) > 0).slice(-LAST);
  if (!shown.length) return null;
  const phases = Object.keys(PHASES).map((phase) => [phase, of(`time/${phase}`)]);
  const longest = Math.max(...shown.map((step) => steps.get(step)));
  const width = (seconds) => ({ width: `${(100 * Math.max(0, seconds)) / longest}%` });
  const row = (step) => {
    const parts = phases.map(([phase, seconds]) => h("i", { class: `phase-${phase}`, style: width(seconds.get(step) ?? 0), title: `${PHASES[phase]}: ${number(seconds.get(step) ?? 0, 3)} s` }));
    const cells = [`${number(steps.get(step), 3)} s`, number(ages.get(step), 2), idle.has(step) ? inUnit(idle.get(step), "share", 2) : "–"];
    return h("tr", { "data-step": step }, h("th", { scope: "row" }, number(step)), h("td", { class: "spent" }, parts), cells.map((text) => h("td", { class: "number" }, text)));
  };
  const legend = Object.entries(PHASES).map(([phase, text]) => [h("i", { class: `phase-${phase}` }), ` ${text} `]);
  const head = ["step", "time of the trainer", "seconds", "versions old", "servers without a request"].map((text) => h("th", {}, text));
  return h("div", { class: "timeline" }, h("h2", {}, "Who waited for whom"), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, shown.map(row)))), h("p", { class: "quiet" }, legend));
}
