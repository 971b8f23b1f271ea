// Build elements and format numbers. Text is only inserted as text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "line", "g", "text", "circle", "rect", "clipPath", "defs", "title"]);

export function h(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, item]) => element.style.setProperty(key, item));
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

export function replace(parent, ...children) {
  parent.replaceChildren();
  add(parent, children);
}

// One by one: a call with 100,000 arguments is a RangeError.
function add(parent, children) {
  for (const child of children.flat(3)) if (child !== null && child !== undefined && child !== false) parent.append(typeof child === "string" ? visible(child) : child);
}

// Append the first items to an element, and a button for the next, so that 100,000 items do not block the browser.
export function addSome(parent, items, most, make, noun, from = 0) {
  add(parent, [items.slice(from, from + most).map((item, i) => make(item, from + i))]);
  const rest = items.length - from - most;
  if (rest > 0) parent.append(h("button", { type: "button", class: "more", onclick: ({ target }) => (target.remove(), addSome(parent, items, most, make, noun, from + most)) }, `${rest.toLocaleString("en")} more ${noun}`));
  return parent;
}

// Characters that change the text direction are shown as escapes, so that they reorder nothing.
export function visible(text) {
  return text.replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

// Numbers for people: 4 significant digits.
export function number(value, digits = 4) {
  if (value === null || value === undefined || value === "") return "–";
  const given = Number(value);
  if (!Number.isFinite(given)) return String(value);
  if (given === 0) return "0";
  const size = Math.abs(given);
  if (size >= 1e6 || size < 1e-4) return given.toExponential(2).replace(/\.?0*e\+?/, "e");
  if (Number.isInteger(given)) return given.toLocaleString("en");
  return String(Number(given.toPrecision(digits)));
}

// A number in the unit of its metric: shares are percentages.
export function inUnit(value, unit, digits = 4) {
  const share = /^share/.test(unit ?? "") && Number.isFinite(value);
  return share ? `${number(Number((100 * value).toFixed(2)), digits)} %` : number(value, digits);
}

export function signed(value) {
  return Number(value) > 0 ? `+${number(value)}` : number(value).replace("-", "−");
}

export function isTyping(event) {
  return /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
}

export function asText(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

// Long texts are shown in parts, so that 10 MB of a repeated letter do not block the browser.
export function longText(text, most = 8000) {
  const whole = visible(String(text ?? ""));
  if (whole.length <= most) return document.createTextNode(whole);
  let shown = most;
  const part = h("span", {}, whole.slice(0, shown));
  const more = h("button", { type: "button", class: "more" });
  const label = () => (more.textContent = `${(whole.length - shown).toLocaleString("en")} more characters: show the next ${Math.min(whole.length - shown, 10 * most).toLocaleString("en")}`);
  more.addEventListener("click", () => {
    part.append(whole.slice(shown, shown + 10 * most));
    shown = Math.min(whole.length, shown + 10 * most);
    if (shown < whole.length) label();
    else more.remove();
  });
  label();
  return h("span", {}, part, " … ", more);
}
