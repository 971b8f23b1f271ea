// What an agent did: its conversations as a tree, the files that it changed, and what the tests found.

import { addSome, asText, h, longText, number, replace } from "./dom.js";
import { folded } from "./message.js";

const SHORT = 400; // characters of context that are not folded
const LINES = 1000; // of a file's diff that are shown at once
const LINE = 1000; // characters of a line
const MOST = 200; // files and tests that are shown at once
const NAME = 200; // characters of their names
const MOST_OPEN = 20; // files of a diff that are open from the start

export function tree(records) {
  if (!records?.length) return null;
  const children = (parent) => {
    const own = records.map((record, i) => [record, i]).filter(([record]) => record.parent === parent);
    return own.length ? h("ol", { class: "tree" }, own.map(([record, i]) => h("li", {}, node(record, i), children(i)))) : null;
  };
  return h("section", {}, h("h2", {}, "Conversations ", h("span", { class: "quiet" }, number(records.length))), children(null));
}

// A conversation; its text is made when it is opened.
function node({ how, turns, parts }, i) {
  const body = h("ol", { class: "messages" });
  const tokens = parts.reduce((sum, part) => sum + part.tokens, 0);
  const open = () => body.childElementCount || replace(body, parts.map(part));
  return h("details", { ontoggle: open }, h("summary", {}, h("b", {}, `${i + 1} `), how, h("span", { class: "quiet" }, ` ${number(turns)} turn${turns === 1 ? "" : "s"}, ${number(tokens)} tokens`)), body);
}

function part({ author, text, tokens }) {
  const content = text ? folded(text, author === "policy" ? Infinity : SHORT) : h("div", { class: "quiet" }, `${number(tokens)} tokens`);
  return h("li", { class: `message ${author === "policy" ? "assistant" : "other"}` }, h("div", { class: "role" }, author), content);
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isDrawn = ([name, value]) => name === "reward" || name === "output" || (name === "tests" && isObject(value)); // of a task
const isVerdict = (task) => isObject(task) && Object.entries(task).some(isDrawn);

export function verdict(task) {
  if (!isVerdict(task)) return null;
  const output = asText(task.output ?? "");
  const tests = isObject(task.tests) ? Object.entries(task.tests) : [];
  const row = ([name, passed]) => h("tr", {}, h("th", { scope: "row" }, longText(name, NAME)), h("td", {}, passed === true ? "passed" : h("span", { class: "badge bad" }, "failed")));
  const passed = tests.filter(([, one]) => one === true).length;
  return h(
    "section",
    {},
    h("h2", {}, "Tests ", h("span", { class: "quiet" }, tests.length ? `${passed} of ${tests.length} passed, ` : "", "reward ", longText(number(asText(task.reward ?? "")), NAME))),
    tests.length ? addSome(h("table", { class: "config" }), tests, MOST, row, "tests") : null,
    output ? h("div", { class: "output" }, longText(output)) : null,
  );
}

export function changes(files) {
  if (!files?.length) return null;
  return addSome(h("section", {}, h("h2", {}, "Changed files ", h("span", { class: "quiet" }, number(files.length)))), files, MOST, changed, "files");
}

// A changed file; its lines are made when it is opened.
function changed({ name, added, removed, lines }, i) {
  const box = h("div", { class: "diff" });
  const line = ([kind, text]) => h("div", { class: kind }, longText(text || " ", LINE));
  const open = () => box.childElementCount || addSome(box, lines, LINES, line, "lines");
  if (i < MOST_OPEN) open();
  return h("details", { open: i < MOST_OPEN, ontoggle: open }, h("summary", {}, h("code", {}, longText(name || "?", NAME)), h("span", { class: "quiet" }, ` +${added} −${removed}`)), box);
}

// The extras of an episode that are not drawn here: other environments have their own `task` and `changes`.
export function undrawn({ task, changes: diff, ...extras }) {
  const rest = isVerdict(task) ? Object.entries(task).filter((entry) => !isDrawn(entry)) : null;
  if (rest?.length) extras.task = Object.fromEntries(rest);
  else if (!rest && task !== undefined) extras.task = task;
  if (diff !== undefined && typeof diff !== "string") extras.changes = diff;
  return extras;
}
