// One episode: its messages, next to the other samples of its prompt, and all values of each token.

import { changes, tree, undrawn, verdict } from "./agent.js";
import { asText, h, longText, number, replace, signed } from "./dom.js";
import { conversation } from "./message.js";

const SHOWN = new Set(["step", "prompt_id", "sample", "reward", "rewards", "stop_reason", "ground_truth", "messages", "spans", "forks", "origins", "turns", "tokens", "credit", "mismatch", "failure", "failure_class", "role"]);
const MOST_TOKENS = 3000;
const MOST_BESIDE = 16;
const COLOURS = [
  ["author", "author"],
  ["difference", "trainer − engine"],
  ["advantage", "advantage"],
  ["logprob", "log-prob of the engine"],
  ["version", "version of the weights"],
];
const LEGENDS = {
  author: "framed: the policy wrote it; grey: the environment or the template",
  difference: "orange: the trainer finds it likelier than the engine did; blue: less likely; the strongest is the largest here",
  advantage: "orange: above 0, made likelier; blue: below 0; the strongest is the largest here",
  logprob: "the stronger, the less likely it was when it was sampled",
  version: "one shade for each version",
};

export function episodeView(app) {
  const element = h("article", { class: "episode" });
  let shown = null;
  let chosen = null;
  let colour = "author";
  let tokens = [];
  let chips = [];
  let panel = null;

  async function enter(route) {
    const place = app.runs[Number(route[0])];
    const row = place?.rows.find(({ link }) => link === `/episode/${route.join("/")}`);
    if (!row) return replace(element, h("p", { class: "warning" }, "This episode does not exist; the run may have been resumed."), back());
    if (!app.list.length) app.list = place.rows;
    shown = row;
    chosen = null;
    try {
      const found = await app.source.episode(place, row.number);
      if (shown === row) draw(place, row, found);
    } catch (error) {
      replace(element, h("p", { class: "warning" }, `The episode cannot be read: ${error.message}`), back());
    }
  }

  function back() {
    return h("a", { href: "#/episodes" }, "‹ all episodes");
  }

  function draw(run, row, { episode, texts, images, conversations, changes: files }) {
    const group = run.rows.filter((one) => one.file === row.file && one.prompt === row.prompt && one.role === row.role);
    replace(
      element,
      h("div", { class: "crumbs" }, back(), h("span", { class: "spring" }), h("button", { type: "button", onclick: () => step(-1), title: "key p" }, "‹ previous"), h("button", { type: "button", onclick: () => step(1), title: "key n" }, "next ›")),
      h("h1", {}, `${row.set === "eval" ? "Held-out" : "Step"} ${row.step ?? "?"}, prompt ${row.prompt.slice(0, 200) || "?"}`, row.role ? `, ${row.role}` : "", h("span", { class: "quiet" }, ` sample ${row.sample ?? "?"}`), app.runs.length > 1 ? h("span", { class: "quiet" }, ` of ${run.name}`) : null),
      facts(episode, row),
      h("section", {}, h("h2", {}, "Conversation"), episode.messages?.length ? h("ol", { class: "messages" }, conversation(episode.messages, images)) : h("p", { class: "quiet" }, "No messages.")),
      tree(conversations),
      verdict(episode.extras?.task),
      changes(files),
      tokensSection(episode, texts, conversations),
      beside(run, row, group),
      extra(episode),
    );
  }

  function facts(episode, row) {
    const pairs = [
      ["reward", episode.reward === undefined ? null : number(episode.reward)],
      ...Object.entries(episode.rewards ?? {}).map(([name, value]) => [`· ${name}`, number(value)]),
      ["credit", episode.credit === undefined ? null : [].concat(episode.credit).map(signed).join(", ")],
      ["stopped by", episode.stop_reason],
      ["turns", number(row.turns)],
      ["tokens of the policy", number(row.tokens)],
      ["worst mismatch", row.mismatch === null ? null : `${number(row.mismatch)} nats`],
    ].filter(([, value]) => value !== null && value !== undefined && value !== "");
    return h(
      "div",
      { class: "facts" },
      episode.failure !== undefined ? h("p", { class: "warning" }, h("b", {}, `Failed (${episode.failure_class ?? "unknown"}): `), longText(episode.failure, 2000)) : null,
      h("dl", {}, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      episode.ground_truth !== undefined && episode.ground_truth !== null ? h("p", { class: "truth" }, h("span", { class: "quiet" }, "ground truth "), h("code", {}, longText(asText(episode.ground_truth), 1000))) : null,
    );
  }

  function tokensSection(episode, texts, conversations) {
    const records = [episode.spans ?? [], ...(episode.forks ?? [])];
    tokens = records.flatMap((spans, record) => spans.flatMap((span, at) => flatten(span, at, record, texts)));
    chips = [];
    if (!tokens.length) return null;
    const select = h("select", { id: "colour", "aria-label": "Colour tokens by" }, COLOURS.map(([value, label]) => h("option", { value }, label)));
    const legend = h("span", { class: "quiet" });
    const flow = h("div", { class: "tokens", role: "listbox", "aria-label": "Tokens", tabindex: 0 });
    panel = h("aside", { class: "panel", "aria-live": "polite" }, h("p", { class: "quiet" }, "Point at a token, or walk with ← and →."));
    select.value = colour;
    select.addEventListener("change", () => paint(select.value));
    const known = Object.keys(texts).length;

    function paint(value) {
      colour = value;
      select.value = value;
      legend.textContent = LEGENDS[colour];
      const shade = shades(colour);
      flow.dataset.colour = colour;
      chips.forEach((chip, i) => Object.entries(shade(tokens[i])).forEach(([name, item]) => chip.style.setProperty(name, item)));
    }

    function more() {
      const from = chips.length;
      const added = tokens.slice(from, from + MOST_TOKENS).map((token, i) => chip(token, from + i));
      flow.querySelector(".more")?.remove();
      for (const [i, one] of added.entries()) {
        const token = tokens[from + i];
        if (token.starts && token.record > 0 && token.span === 0) flow.append(h("p", { class: "quiet" }, `conversation ${token.record + 1} ${conversations?.[token.record]?.how ?? ""}`));
        flow.append(one);
        if (/\n/.test(token.text)) flow.append(h("br", {}));
        chips.push(one);
      }
      if (chips.length < tokens.length) flow.append(h("button", { type: "button", class: "more", onclick: more }, `${(tokens.length - chips.length).toLocaleString("en")} more tokens`));
      paint(colour);
    }
    flow.addEventListener("pointerover", (event) => event.target.dataset?.token && choose(Number(event.target.dataset.token), false));
    flow.addEventListener("click", (event) => event.target.dataset?.token && choose(Number(event.target.dataset.token), true));
    more();
    element.paint = paint;
    const missing = known ? null : h("span", { class: "quiet" }, " There is no tokenizer in the run's model/ or at model.path, so tokens are shown by their ids.");
    return h("section", {}, h("h2", {}, "Tokens ", h("span", { class: "quiet" }, number(tokens.reduce((sum, { count }) => sum + count, 0)))), h("div", { class: "controls" }, h("label", { for: "colour" }, "coloured by ", select), legend, missing), h("div", { class: "token-box" }, flow, panel));
  }

  function chip(token, i) {
    const label = token.text.replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "∅";
    return h("span", { class: `token ${token.author === "policy" ? "policy" : "context"}${token.clipped ? " clipped" : ""}`, "data-token": i, role: "option" }, label.length > 200 ? `${label.slice(0, 200)}…` : label);
  }

  function choose(i, scroll = true) {
    if (!tokens[i] || !chips[i]) return;
    if (chosen !== null) chips[chosen]?.classList.remove("chosen");
    chosen = i;
    chips[i].classList.add("chosen");
    if (scroll) chips[i].scrollIntoView({ block: "nearest" });
    const token = tokens[i];
    const rows = [
      ["author", token.author],
      ["token id", token.id],
      ["log-prob, engine", token.engine === undefined ? "–" : `${number(token.engine)} (${number(100 * Math.exp(Number(token.engine)))} %)`],
      ["log-prob, trainer", token.trainer === undefined ? "–" : `${number(token.trainer)} (${number(100 * Math.exp(Number(token.trainer)))} %)`],
      ["trainer − engine", token.difference === undefined ? "–" : signed(token.difference)],
      ["advantage", token.advantage === undefined ? "–" : signed(token.advantage)],
      ["weight in the loss", number(token.weight)],
      ["clipped", token.clipped === undefined ? "–" : token.clipped ? "yes" : "no"],
      ["weights' version", token.version ?? "–"],
      ["place", `${i + 1} of ${tokens.length}`],
      ...Object.entries(token.more).map(([name, value]) => [name, asText(value).slice(0, 200)]),
    ];
    const why = token.author === "policy" && token.trainer === undefined ? h("p", { class: "quiet" }, "It did not train: held-out, failed, frozen, or without a difference between the rewards of its group.") : null;
    panel.classList.add("filled");
    replace(panel, h("p", { class: "token-text" }, JSON.stringify(token.text)), h("table", {}, rows.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { "data-fact": name }, value)))), why);
  }

  // Colours of tokens by the selected value; the sign is also an underline, for people who cannot distinguish the colours.
  function shades(name) {
    const value = { difference: (t) => t.difference, advantage: (t) => t.advantage, logprob: (t) => t.engine, version: (t) => t.version }[name];
    const none = { "--shade": "0%", "--tone": "transparent", "--sign": "none" };
    if (!value) return () => none;
    const found = tokens.map(value).filter((one) => Number.isFinite(Number(one)) && one !== undefined && one !== null).map(Number);
    if (name === "version") {
      const versions = [...new Set(found)].sort((a, b) => a - b);
      return (token) => (token.version === undefined ? none : { "--tone": `var(--run-${versions.indexOf(Number(token.version)) % 8})`, "--shade": "45%", "--sign": "none" });
    }
    const largest = found.reduce((most, one) => Math.max(most, Math.abs(one)), 0) || 1;
    return (token) => {
      const one = Number(value(token));
      if (value(token) === undefined || Number.isNaN(one)) return none;
      const share = Math.min(1, Math.abs(one) / largest);
      const up = name !== "logprob" && one > 0;
      return { "--tone": up ? "var(--up)" : "var(--down)", "--shade": `${Math.round(75 * share)}%`, "--sign": share > 0.02 && name !== "logprob" ? (up ? "solid" : "dotted") : "none" };
    };
  }

  function beside(run, row, group) {
    if (group.length < 2) return null;
    const box = h("div", { class: "beside" });
    const wanted = group.slice(0, MOST_BESIDE);
    const details = h("details", { open: true }, h("summary", {}, h("h2", {}, "The group side by side ", h("span", { class: "quiet" }, `${group.length} answers to this prompt in this step${group.length > MOST_BESIDE ? `, the first ${MOST_BESIDE}` : ""}`))), box);
    Promise.all(wanted.map((one) => app.source.episode(run, one.number).catch(() => null))).then((found) => {
      if (shown !== row) return;
      const shared = common(found.filter(Boolean).map(({ episode }) => episode.messages ?? []));
      replace(
        box,
        wanted.map((one, i) => {
          const messages = found[i]?.episode.messages ?? [];
          return h(
            "div",
            { class: `column${one === row ? " this" : ""}` },
            h("a", { href: `#${one.link}`, "aria-current": one === row ? "true" : null }, `sample ${one.sample ?? "?"}`, h("b", {}, ` ${number(one.reward)}`), h("span", { class: "quiet" }, ` ${one.failure ? "failed" : one.stop}`)),
            h("ol", { class: "messages small" }, conversation(messages, found[i]?.images).slice(shared)),
          );
        }),
      );
    });
    return h("section", {}, details);
  }

  function extra(episode) {
    const extras = undrawn(episode.extras ?? {});
    const rest = Object.entries({ ...episode, extras }).filter(([name]) => !SHOWN.has(name) && !(name === "extras" && !Object.keys(extras).length));
    if (!rest.length) return null;
    return h("section", {}, h("h2", {}, "More that was noted"), h("table", { class: "config" }, rest.flatMap(([name, value]) => (name === "extras" ? Object.entries(value).map(([key, item]) => [`extras.${key}`, item]) : [[name, value]])).map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, longText(asText(value), 3000))))));
  }

  // The first sampled token; a long prompt may be in front of it.
  function start() {
    const at = tokens.findIndex(({ author }) => author === "policy");
    return at < 0 || at >= chips.length ? 0 : at;
  }

  function step(by) {
    const at = app.list.indexOf(shown);
    const next = app.list[at + by];
    if (next) app.go(next.link);
    else app.status(by > 0 ? "This is the last episode of the list." : "This is the first episode of the list.");
  }

  return {
    element,
    enter,
    key(event) {
      if (event.key === "Escape") app.go("/episodes");
      else if (event.key === "n") step(1);
      else if (event.key === "p") step(-1);
      else if (event.key === "c") element.paint?.(COLOURS[(COLOURS.findIndex(([name]) => name === colour) + 1) % COLOURS.length][0]);
      else if (event.key === "ArrowRight") choose(chosen === null ? start() : Math.min(chips.length - 1, chosen + 1));
      else if (event.key === "ArrowLeft") choose(chosen === null ? start() : Math.max(0, chosen - 1));
      else return false;
      return true;
    },
  };
}

// The tokens of a span; those of an image are one.
function flatten(span, at, record, texts) {
  const { token_ids: ids = [], author, logprobs = [], version, trainer_logprobs: trainer, advantages, weight, clipped, images = [], ...more } = span;
  const cut = clipped && new Set(clipped);
  const lengths = new Map(images.map(([, offset, length]) => [offset, length]));
  const folded = (i) => images.some(([, offset, length]) => offset < i && i < offset + length);
  const all = ids.map((id, i) => ({
    id,
    record,
    span: at,
    place: i,
    starts: i === 0,
    count: lengths.get(i) ?? 1,
    text: lengths.has(i) ? `[image, ${lengths.get(i)} tokens]` : (texts[id] ?? `#${id} `),
    author: String(author),
    version,
    engine: logprobs[i],
    trainer: trainer?.[i],
    difference: trainer?.[i] === undefined ? undefined : Number(trainer[i]) - Number(logprobs[i]),
    advantage: advantages?.[i],
    weight: author === "policy" ? weight : undefined,
    clipped: cut && cut.has(i),
    more,
  }));
  return images.length ? all.filter(({ place }) => !folded(place)) : all;
}

// The number of messages that all of these have in common at the beginning.
function common(conversations) {
  const first = conversations[0] ?? [];
  let shared = 0;
  while (shared < first.length && conversations.every((messages) => JSON.stringify(messages[shared]) === JSON.stringify(first[shared]))) shared++;
  return Math.min(shared, ...conversations.map((messages) => messages.length - 1).filter((size) => size >= 0));
}
