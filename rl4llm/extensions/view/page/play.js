// The page of `rl4llm recipe play`: a person answers in the place of the policy.

import { h, longText, number, replace } from "./dom.js";
import { conversation as listed } from "./message.js";

const EVERY_MS = 400;
const conversation = h("ol", { class: "messages played" });
const said = h("div", { class: "ended" });
const seen = h("pre", { class: "seen" });
const details = h("details", {}, h("summary", {}, "The prompt as a model gets it"), seen);
const text = h("textarea", { id: "answer", rows: 5, "aria-label": "Your answer", placeholder: "Your answer. Ctrl+Enter sends it." });
const send = h("button", { type: "submit" }, "send");
const form = h("form", { class: "answer" }, text, h("div", { class: "controls" }, send, h("button", { type: "button", onclick: () => tell("leave") }, "give up")));
const row = h("input", { id: "row", type: "number", min: 0, class: "short" });
const begin = h("button", { type: "submit" }, "play");
const choice = h("form", { class: "controls" }, h("label", { for: "row" }, "prompt ", row), h("span", { class: "quiet" }), begin);
let drawn = "";

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (text.value.trim()) tell("answer", { text: text.value }).then((done) => done && (text.value = ""));
});
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
choice.addEventListener("submit", (event) => {
  event.preventDefault();
  tell("start", { row: Number(row.value) });
});

async function tell(what, given = {}) {
  try {
    const answer = await fetch(`/api/${what}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(given) });
    if (!answer.ok) throw new Error(await answer.text());
    draw(await answer.json());
    return true;
  } catch (error) {
    status(error.message);
    return false;
  }
}

function status(words) {
  document.getElementById("status").textContent = words;
}

function draw(state) {
  const now = JSON.stringify(state);
  if (now === drawn) return;
  const asked = state.asks && !JSON.parse(drawn || "{}").asks;
  drawn = now;
  status("");
  replace(conversation, listed(state.messages ?? []));
  replace(said, ended(state));
  seen.textContent = state.prompt;
  details.hidden = form.hidden = !state.asks;
  choice.hidden = state.playing;
  choice.querySelector("span").textContent = `of 0 to ${state.prompts - 1}`;
  row.max = state.prompts - 1;
  if (!state.playing) row.value = Math.min(state.row + 1, state.prompts - 1);
  if (state.playing && !state.asks) status("The environment is working.");
  if (asked) {
    text.placeholder = `Your answer${state.role ? ` as ${state.role}` : ""}. Ctrl+Enter sends it.`;
    text.focus();
    form.scrollIntoView({ block: "nearest" });
  }
}

function ended(state) {
  if (state.error) return h("p", { class: "warning" }, longText(state.error));
  if (!state.result) return null;
  const facts = (one) => [["reward", number(one.reward)], ...Object.entries(one.rewards).map(([name, value]) => [`· ${name}`, number(value)]), ["stopped by", one.stop_reason]];
  return [
    h("h2", {}, "Result"),
    state.result.map((one) => h("div", { class: "facts" }, h("dl", {}, one.role ? h("div", {}, h("dt", {}, "role"), h("dd", {}, one.role)) : null, facts(one).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))))),
    state.ground_truth === null || state.ground_truth === undefined ? null : h("p", {}, h("span", { class: "quiet" }, "ground truth "), h("code", {}, longText(typeof state.ground_truth === "string" ? state.ground_truth : JSON.stringify(state.ground_truth)))),
  ];
}

async function follow() {
  try {
    const answer = await fetch("/api/play");
    if (!answer.ok) throw new Error(await answer.text());
    draw(await answer.json());
  } catch (error) {
    status(`The server does not answer: ${error.message}`);
  }
  document.documentElement.dataset.ready = "yes";
  setTimeout(follow, EVERY_MS);
}

document.documentElement.dataset.theme = "auto";
if (location.search) history.replaceState(null, "", "/"); // the token is in a cookie now
replace(document.getElementById("top"), h("div", { class: "bar" }, h("b", { class: "brand" }, "rl4llm recipe play"), h("span", { class: "quiet" }, "you are the policy")));
replace(document.getElementById("main"), conversation, said, form, details, choice);
follow();
