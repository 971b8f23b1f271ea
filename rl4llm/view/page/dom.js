// Building elements and writing numbers. Text only ever goes in as text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "line", "g", "text", "circle", "rect", "clipPath", "defs"]);

export function h(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, item]) => element.style.setProperty(key, item));
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function replace(parent, ...children) {
  parent.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
}

// Numbers as people read them: 4 digits that mean something.
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

export function signed(value) {
  return Number(value) > 0 ? `+${number(value)}` : number(value).replace("-", "−");
}

export function isTyping(event) {
  return /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
}

// Long texts are shown in part, so that 10 MB of a repeated letter do not stop the browser.
export function longText(text, most = 8000) {
  const whole = String(text ?? "");
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
