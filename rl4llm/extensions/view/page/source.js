// The source of the page's data: a server that may follow a run, or the file itself. Both have the same methods.

import { axesOf } from "./lines.js";

const PAGE = String(Math.random()); // of this load, whose log began empty

export function openSource() {
  const embedded = document.getElementById("data");
  return embedded ? new FileSource(JSON.parse(embedded.textContent)) : new ServerSource();
}

async function get(path, options) {
  const response = await fetch(path, options);
  if (!response.ok) throw new Error((await response.text()).trim() || `HTTP ${response.status}`);
  return response.json();
}

// A run as the page knows it: about, metrics by step, rows of its list of episodes.
class Run {
  constructor(number, about) {
    Object.assign(this, { number, about, steps: new Map(), glossary: new Map(), rows: [], files: [], generation: 0, next: 0, pending: 0, all: 0 });
    this.whole = false; // whether the whole list has been fetched
  }

  get name() {
    return this.about.name;
  }

  addMetrics(rows, glossary) {
    for (const [name, entry] of Object.entries(glossary)) this.glossary.set(name, entry);
    for (const { step, ...values } of rows) this.steps.set(step, { ...this.steps.get(step), ...values });
    this.axes = axesOf(this.steps);
  }

  metricNames() {
    const names = new Set();
    for (const values of this.steps.values()) for (const name in values) names.add(name);
    return names;
  }

  points(name) {
    const found = [];
    for (const [step, values] of this.steps) if (Number.isFinite(values[name])) found.push([step, values[name]]);
    return found.sort((a, b) => a[0] - b[0]);
  }

  // The link of a row stays the same when the run is shown again; its number depends on what was read first.
  addRows(columns, rows) {
    for (const values of rows) {
      const row = { run: this.number, number: this.rows.length };
      columns.forEach((name, i) => (row[name] = values[i]));
      row.link = `/episode/${this.number}/${this.files[row.file]}/${row.line}`;
      this.rows.push(row);
    }
  }
}

class ServerSource {
  live = true;

  async open() {
    this.runs = (await get("/api/runs")).map((about, number) => new Run(number, about));
    return this.runs;
  }

  // Fetch what is new; return the names of what changed.
  async update(run) {
    const changed = { metrics: false, rows: false };
    const metrics = await get(`/api/runs/${run.number}/metrics?from=${run.next}`);
    if (metrics.reset) run.steps.clear();
    if (metrics.reset || metrics.rows.length) changed.metrics = true;
    run.addMetrics(metrics.rows, metrics.glossary);
    run.next = metrics.next;
    const list = await get(`/api/runs/${run.number}/episodes?from=${run.rows.length}&generation=${run.generation}`);
    if (list.reset) run.rows = [];
    run.generation = list.generation;
    run.files = list.files;
    if (list.reset || list.rows.length) changed.rows = true;
    if (list.from === run.rows.length) run.addRows(list.columns, list.rows);
    run.pending = list.pending;
    run.all = run.rows.length;
    run.whole = run.whole || !list.more;
    if (changed.metrics || changed.rows || !run.story) await this.refreshStory(run);
    changed.more = list.more && list.rows.length > 0;
    return changed;
  }

  async refreshAbout() {
    for (const [number, about] of (await get("/api/runs")).entries()) if (this.runs[number]) this.runs[number].about = about;
  }

  async refreshStory(run) {
    run.story = await get(`/api/runs/${run.number}/story`);
  }

  episode(run, number) {
    return get(`/api/runs/${run.number}/episodes/${number}?generation=${run.generation}`);
  }

  // Return the messages that follow a line, and whether it began a conversation; null ends it.
  chat(number, line) {
    const headers = { "Content-Type": "application/json" };
    return get(`/api/runs/${number}/chat`, { method: "POST", headers, body: JSON.stringify({ page: PAGE, line }) });
  }

  search(run, text) {
    return get(`/api/runs/${run.number}/search?q=${encodeURIComponent(wellFormed(text))}&generation=${run.generation}`);
  }
}

function wellFormed(text) {
  return text.toWellFormed ? text.toWellFormed() : text.replace(/[\ud800-\udfff]/g, "\ufffd");
}

class FileSource {
  live = false;

  constructor(data) {
    this.data = data;
  }

  async open() {
    this.runs = this.data.runs.map((given, number) => {
      const run = new Run(number, given.about);
      run.addMetrics(given.metrics, given.glossary);
      run.files = given.files;
      run.addRows(given.columns, given.rows);
      Object.assign(run, { whole: true, all: given.all, story: { ...given.story, generation: 0 } });
      return run;
    });
    return this.runs;
  }

  async update() {
    return { metrics: false, rows: false, more: false };
  }

  async refreshAbout() {}

  async refreshStory() {}

  async episode(run, number) {
    const found = this.data.runs[run.number].episodes[number];
    if (!found) throw new Error(`episode ${number} is not in this file`);
    return found;
  }

  async search(run, text) {
    const needle = text.toLowerCase();
    const numbers = this.data.runs[run.number].episodes.flatMap(({ episode }, number) => (said(episode).includes(needle) ? [number] : []));
    return { numbers, complete: true };
  }
}

function said(episode) {
  const texts = [episode.prompt_id, episode.failure, asText(episode.ground_truth)];
  for (const message of episode.messages ?? []) texts.push(message.content, ...(message.tool_calls ?? []).map((call) => JSON.stringify(call)));
  return texts.filter((text) => text !== null && text !== undefined).join("\n").toLowerCase();
}

function asText(value) {
  return typeof value === "object" && value !== null ? JSON.stringify(value) : value;
}
