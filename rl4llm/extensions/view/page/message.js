// The messages of a conversation. A tool call is a card beside its answer, in the message of the tool.

import { asText, h, longText, number } from "./dom.js";

const ROLES = ["system", "user", "assistant", "tool"];
const SHOWN = ["role", "content", "parts", "tool_calls", "tool_call_id", "failed", "seconds"];
const SHORT = 400; // characters of arguments and answers, up to which they are not folded
const LINE = 120;

// `images` has a small copy of each image by digest.
export function conversation(messages, images = {}) {
  const calls = answered(messages);
  const found = new Set(calls.values());
  return messages.map((one) => message(one, images, calls.get(one), (call) => found.has(call)));
}

// The call of each message of a tool: the one that it holds, the one with its id, or the next of the turn.
function answered(messages) {
  const found = new Map();
  let open = [];
  for (const one of messages) {
    const calls = one.tool_calls ?? [];
    if (one.role !== "tool") open = [...calls];
    else {
      const at = Math.max(0, open.findIndex((call) => one.tool_call_id && call.id === one.tool_call_id));
      const [next] = open.splice(at, 1);
      if (next ?? calls[0]) found.set(one, next ?? calls[0]);
    }
  }
  return found;
}

function message(one, images, call, isAnswered) {
  const calls = one.role === "tool" ? [] : (one.tool_calls ?? []);
  const content = one.parts ? h("div", { class: "content" }, one.parts.map((part) => (typeof part === "string" ? longText(part) : picture(part, images)))) : one.content ? folded(one.content, call ? SHORT : Infinity) : null;
  const more = Object.entries(one).filter(([name]) => !SHOWN.includes(name));
  const badge = one.failed ? h("span", { class: "badge bad" }, "failed") : null;
  return h(
    "li",
    { class: `message ${ROLES.includes(one.role) ? one.role : "other"}` },
    h("div", { class: "role" }, String(one.role), one.tool_call_id ? h("span", { class: "quiet" }, ` ${one.tool_call_id}`) : null, call ? null : badge),
    call ? card(call, [badge, took(one)], content ?? empty()) : (content ?? (calls.length ? null : empty())),
    calls.map((own) => (isAnswered(own) ? h("div", { class: "quiet" }, `calls ${nameOf(own)}`) : card(own))),
    more.map(([name, value]) => h("div", { class: "quiet" }, `${name}: `, longText(asText(value), 500))),
  );
}

function took({ seconds }) {
  return Number.isFinite(seconds) ? h("span", { class: "quiet" }, ` ${seconds < 1 ? `${number(seconds * 1000, 3)} ms` : `${number(seconds, 3)} s`}`) : null;
}

function card(call, [badge, duration] = [], answer) {
  const { arguments: given } = call.function ?? call;
  const waits = answer ? null : h("div", { class: "quiet" }, "no answer");
  return h("div", { class: `call card${badge ? " failed" : ""}` }, h("div", {}, h("strong", {}, nameOf(call)), " ", badge, duration, " ", h("code", {}, folded(asText(given ?? {}), SHORT))), answer, waits);
}

function nameOf(call) {
  return String((call.function ?? call).name ?? "?");
}

export function folded(text, most) {
  const whole = h("div", { class: "content" }, longText(text));
  if (text.length <= most) return whole;
  return h("details", {}, h("summary", {}, `${text.slice(0, LINE).split("\n")[0]} …`, h("span", { class: "quiet" }, ` ${number(text.length)} characters`)), whole);
}

function empty() {
  return h("div", { class: "quiet" }, "(empty)");
}

function picture({ digest }, images) {
  if (!images[digest]) return h("span", { class: "quiet" }, digest ? "(an image whose file is gone)" : "(an image that the policy did not see)");
  return h("img", { class: "picture", src: images[digest], alt: "image", title: digest });
}
