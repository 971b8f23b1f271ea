// A conversation with the model of a run, below the list of episodes; its tools run on the machine of the server.

import { h, replace } from "./dom.js";
import { conversation } from "./message.js";

export function chatPanel(app) {
  const runs = app.runs.filter((run) => run.about.chat);
  if (!runs.length) return null;
  const log = h("ol", { class: "messages", "aria-live": "polite" });
  const choice = h("select", { "aria-label": "Run", "data-chat": "run" }, runs.map((run) => h("option", { value: run.number }, run.name)));
  const line = h("input", { type: "text", placeholder: "a question of this run", "aria-label": "Your line", "data-chat": "line", autocomplete: "off" });
  const notice = h("p", { class: "quiet", role: "status" });
  const state = (app.chat ??= { messages: [] });

  const draw = (text = "") => (replace(log, conversation(state.messages)), replace(notice, text));

  async function reset() {
    state.messages = [];
    draw();
    await app.source.chat(Number(choice.value), null);
  }

  async function send(event) {
    event.preventDefault();
    const text = line.value.trim();
    if (!text || line.disabled) return;
    const asked = { role: "user", content: text };
    state.messages.push(asked);
    line.value = "";
    line.disabled = true;
    draw("The model answers. Its first answer waits until it is loaded.");
    try {
      const { began, messages } = await app.source.chat(Number(choice.value), text);
      state.messages = [...(began ? [asked] : state.messages), ...messages];
      draw();
    } catch (error) {
      draw(`${error.message} The next line begins a new conversation.`);
    }
    line.disabled = false;
    line.focus();
  }

  choice.addEventListener("change", reset);
  draw();
  return h(
    "details",
    { class: "chat", open: state.messages.length > 0 },
    h("summary", {}, "Talk to the model"),
    log,
    notice,
    h("form", { class: "controls", onsubmit: send }, runs.length > 1 ? choice : null, line, h("button", {}, "Send"), h("button", { type: "button", onclick: reset }, "New conversation")),
  );
}
