// What the engines do now, asked each second while somebody looks.

import { get } from "./api.js";
import { byId } from "./dom.js";
import { Plot } from "./plots.js";

const EVERY = 1000; // milliseconds
const plots = {
  speed: new Plot("Tokens a second", "", 10, 1),
  running: new Plot("Running", "", 4),
  waiting: new Plot("Waiting", "", 4),
  cache: new Plot("Cache in use", " %", 100, 1),
};
let last = null; // { at, tokens, model }

/** Begin; `refused` is told of each error. */
export function start(refused) {
  byId("plots").append(...Object.values(plots).map((plot) => plot.element));
  const tick = async () => {
    if (document.visibilityState === "visible" && !byId("live-panel").hidden) await look(refused);
    setTimeout(tick, EVERY);
  };
  tick();
}

async function look(refused) {
  const model = byId("model").value;
  if (!model) return;
  try {
    const found = (await get(`/v1/report?model=${encodeURIComponent(model)}`))[model];
    show(model, found?.statistics);
    byId("live-note").textContent = note(found);
  } catch (error) {
    show(model, null);
    byId("live-note").textContent = error.message;
    refused(error);
  }
}

function note(found) {
  if (!found) return "The model is not loaded; the first question loads it.";
  const { health } = found;
  if (health.failure) return `It has failed: ${health.failure}`;
  if (health.stalled) return `A step hangs in ${health.inside ?? "the model"}.`;
  return health.ready ? "" : "Its queue is full.";
}

function show(model, seen) {
  const at = performance.now();
  const speed = seen && last?.model === model && seen.tokens_out >= last.tokens
    ? (1000 * (seen.tokens_out - last.tokens)) / (at - last.at) : null;
  last = seen ? { at, tokens: seen.tokens_out, model } : null;
  plots.speed.add(speed);
  plots.running.add(seen ? seen.running : null);
  plots.waiting.add(seen ? seen.waiting : null);
  const pages = seen?.cache?.pages;
  plots.cache.add(pages ? (100 * seen.cache.pages_used) / pages : null);
}
