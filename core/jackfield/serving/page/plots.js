// Small plots of what comes in each second, drawn as SVG.

import { make } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const POINTS = 60;

function drawn(tag, attributes) {
  const found = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  return found;
}

/** The last minute of one figure. `least` is how high the scale is at least. */
export class Plot {
  constructor(title, unit, least, digits = 0) {
    Object.assign(this, { title, unit, least, digits, values: [] });
    this.svg = drawn("svg", { viewBox: `0 0 ${POINTS - 1} 100`, preserveAspectRatio: "none", role: "img" });
    this.area = this.svg.appendChild(drawn("path", { class: "area" }));
    this.line = this.svg.appendChild(drawn("path", { class: "line" }));
    this.now = make("b", {}, "–");
    this.element = make("figure", {}, make("figcaption", {}, make("span", {}, title), this.now), this.svg);
    this.#label("no figures yet");
  }

  #label(text) {
    this.svg.setAttribute("aria-label", `${this.title}, the last minute: ${text}`);
  }

  #worded(value) {
    return `${value.toFixed(this.digits)}${this.unit}`;
  }

  /** Add a value; null: there is none now, and the line has a gap. */
  add(value) {
    this.values = [...this.values, value].slice(-POINTS);
    const known = this.values.filter((one) => one !== null);
    const most = Math.max(this.least, ...known);
    this.now.textContent = value === null ? "–" : this.#worded(value);
    this.#label(known.length ? `now ${this.now.textContent}, most ${this.#worded(Math.max(...known))}` : "no figures yet");
    const start = POINTS - this.values.length;
    let line = "", area = "", from = null;
    this.values.forEach((one, at) => {
      const x = start + at;
      if (one === null) {
        area += from === null ? "" : `L${x - 1},100Z`;
        from = null;
        return;
      }
      const y = 97 - (94 * one) / most;
      line += `${from === null ? "M" : "L"}${x},${y.toFixed(1)}`;
      area += from === null ? `M${x},100L${x},${y.toFixed(1)}` : `L${x},${y.toFixed(1)}`;
      from ??= x;
    });
    if (from !== null) area += `L${POINTS - 1},100Z`;
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }
}
