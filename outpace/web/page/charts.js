// The charts of the live view: SVG with the classes that style.css gives to the charts of reports too.

const SVG = "http://www.w3.org/2000/svg";

function node(name, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

/** A line over time without axes. `values` may have nulls; `reference` is a level to compare with. */
export function sparkline(root, values, { label, reference = null, floor = 0 }) {
  const width = 240;
  const height = 44;
  const known = values.filter((value) => value !== null);
  const top = Math.max(...known, reference === null ? 0 : 1.15 * reference, 1e-9);
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  const x = (place) => (place / Math.max(values.length - 1, 1)) * width;
  const y = (value) => height - 2 - ((value - floor) / (top - floor)) * (height - 4);
  if (reference !== null) svg.append(node("line", { x1: 0, x2: width, y1: y(reference), y2: y(reference), class: "reference" }));
  let path = "";
  values.forEach((value, place) => {
    if (value !== null) path += `${path && values[place - 1] !== null ? "L" : "M"}${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
  });
  if (path) {
    if (known.length === values.length) svg.append(node("path", { d: `${path}L${width} ${height}L0 ${height}Z`, class: "area" }));
    svg.append(node("path", { d: path, class: "line" }));
  }
  root.replaceChildren(svg);
}

const FRAME = { width: 460, height: 220, left: 44, right: 10, top: 12, bottom: 34 };

function frame(label, ticks) {
  const { width, height, left, right, top, bottom } = FRAME;
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const y = (share) => height - bottom - share * (height - top - bottom);
  for (const share of ticks) {
    svg.append(node("line", { x1: left, x2: width - right, y1: y(share), y2: y(share), class: "grid" }));
    svg.append(node("text", { x: left - 6, y: y(share) + 4, "text-anchor": "end", class: "tick" }, `${Math.round(100 * share)}%`));
  }
  return { svg, y };
}

/** Shares by position, one line per series: {name, values: [share or null], className}. */
export function shareLines(root, series, { label, xLabel }) {
  const { svg, y } = frame(label, [0, 0.25, 0.5, 0.75, 1]);
  const { width, height, left, right } = FRAME;
  const count = Math.max(...series.map((each) => each.values.length), 1);
  const x = (place) => left + ((place + 0.5) / count) * (width - left - right);
  for (let place = 0; place < count; place++) {
    if (count <= 16 || place % 2 === 0) svg.append(node("text", { x: x(place), y: height - 18, "text-anchor": "middle", class: "tick" }, `${place + 1}`));
  }
  svg.append(node("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle", class: "tick" }, xLabel));
  for (const each of series) {
    const group = node("g", { class: "series" });
    group.dataset.proposer = each.name;
    const places = each.values.map((value, place) => [value, place]).filter(([value]) => value !== null);
    group.append(node("polyline", { points: places.map(([value, place]) => `${x(place).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }));
    for (const [value, place] of places) group.append(node("circle", { cx: x(place), cy: y(value), r: 3.2 }));
    svg.append(group);
  }
  root.replaceChildren(svg, key(series.map((each) => each.name)));
}

/** Shares of a whole: [{name, share}]. */
export function shareBars(root, bars, { label, xLabel }) {
  const most = Math.max(...bars.map((bar) => bar.share), 0.01);
  const ticks = most > 0.5 ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.1, 0.2, 0.3, 0.4, 0.5];
  const { svg, y } = frame(label, ticks.map((tick) => tick / ticks.at(-1)));
  const scale = ticks.at(-1);
  [...svg.querySelectorAll("text")].forEach((text, place) => { text.textContent = `${Math.round(100 * ticks[place])}%`; });
  const { width, height, left, right, bottom } = FRAME;
  const slot = (width - left - right) / Math.max(bars.length, 1);
  bars.forEach((bar, place) => {
    const middle = left + slot * (place + 0.5);
    const wide = Math.min(slot * 0.7, 40);
    const top = y(bar.share / scale);
    svg.append(node("rect", { x: middle - wide / 2, y: top, width: wide, height: Math.max(height - bottom - top, 0), rx: 2, class: bar.className ?? "bar-fill" }));
    svg.append(node("text", { x: middle, y: height - 18, "text-anchor": "middle", class: "tick" }, bar.name));
  });
  svg.append(node("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle", class: "tick" }, xLabel));
  root.replaceChildren(svg);
}

function key(names) {
  const list = document.createElement("ul");
  list.className = "legend";
  for (const name of names) {
    const item = document.createElement("li");
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.dataset.proposer = name;
    item.append(swatch, name);
    list.append(item);
  }
  return list;
}
