// What an agent did: its conversations as a tree, the files that it changed, and what the tests found.

import { asText, h, longText, number, replace } from "./dom.js";
import { folded } from "./message.js";

const SHORT = 400; // characters of context that are not folded
const LINES = 1000; // of a diff that are shown at once
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

export function verdict(task) {
  if (!task || typeof task !== "object") return null;
  const tests = Object.entries(task.tests ?? {});
  const rows = tests.map(([name, passed]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, passed === true ? "passed" : h("span", { class: "badge bad" }, "failed"))));
  const passed = tests.filter(([, one]) => one === true).length;
  return h(
    "section",
    {},
    h("h2", {}, "Tests ", h("span", { class: "quiet" }, tests.length ? `${passed} of ${tests.length} passed, ` : "", `reward ${number(asText(task.reward ?? ""))}`)),
    tests.length ? h("table", { class: "config" }, rows) : null,
    task.output ? h("div", { class: "output" }, longText(asText(task.output))) : null,
  );
}

export function changes(files) {
  if (!files?.length) return null;
  const sections = files.map((file, i) => h("details", { open: i < MOST_OPEN }, h("summary", {}, h("code", {}, file.name || "?"), h("span", { class: "quiet" }, ` +${file.added} −${file.removed}`)), diff(file.lines)));
  return h("section", {}, h("h2", {}, "Changed files ", h("span", { class: "quiet" }, number(files.length))), sections);
}

function diff(lines) {
  const box = h("div", { class: "diff" });
  const more = (from) => {
    box.append(...lines.slice(from, from + LINES).map(([kind, text]) => h("div", { class: kind }, longText(text || " "))));
    const rest = lines.length - from - LINES;
    if (rest > 0) box.append(h("button", { type: "button", class: "more", onclick: ({ target }) => (target.remove(), more(from + LINES)) }, `${number(rest)} more lines`));
  };
  more(0);
  return box;
}
