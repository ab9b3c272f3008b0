// Small helpers. Text from the server only ever becomes text nodes.

export const $ = (id) => document.getElementById(id);

/** An element with a class, properties or attributes, and children; strings become text. */
export function element(name, options = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key in made && key !== "role") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

export const times = (ratio) => `${ratio.toFixed(2)}×`;

export function duration(seconds) {
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  return seconds < 100 ? `${seconds.toFixed(2)} s` : `${seconds.toFixed(0)} s`;
}

/** Reads text to screen readers, in pieces and not more often than they can be said. */
const SPEAK_EVERY = 2500;
let unsaid = "";
let timer = null;

export function speak(text, { now = false } = {}) {
  unsaid += text;
  if (now) sayIt();
  else timer ??= setTimeout(sayIt, SPEAK_EVERY);
}

function sayIt() {
  clearTimeout(timer);
  timer = null;
  if (!unsaid.trim()) return;
  const region = $("spoken");
  region.append(element("p", {}, unsaid));
  while (region.childElementCount > 4) region.firstElementChild.remove();
  unsaid = "";
}
