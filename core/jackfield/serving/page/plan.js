// What a model runs with, and why.

import { get } from "./api.js";
import { byId, make, table } from "./dom.js";
import { offer } from "./settings.js";

let shown = null; // the model whose plan stands there

/** Show the plan of the model that is chosen, where it is loaded. Throws Refusal. */
export async function show() {
  const model = byId("model").value;
  if (model === shown) return;
  const plan = model ? (await get(`/v1/plan?model=${encodeURIComponent(model)}`))[model] : null;
  shown = plan ? model : null;
  if (!plan) {
    byId("plan").replaceChildren(make("p", { class: "note" }, "The model is not loaded; the first question loads it."));
    offer("decoding", [""], { "": "the plan's" });
    return;
  }
  const names = Object.keys(plan.decodings);
  offer("decoding", ["", ...names], { "": `the plan's (${names[0]})` });
  byId("plan").replaceChildren(...parts(plan));
}

function parts(plan) {
  const { architecture, dtype, device, layout } = plan;
  const chosen = [...Object.entries(plan.chosen), ...plan.kernels.map((one) => ["kernel", one])];
  const rows = chosen.map(([kind, one]) => [kind, one.name + options(one), one.how, `${one.distribution} ${one.version}`]);
  const passed = plan.refused.map((one) => `${one.kind} ${one.name}: ${one.reasons.join("; ")}`);
  const needs = Object.entries(plan.features).map(([name, why]) => `${name}: ${why}`);
  return [
    make("p", { class: "note" }, `${architecture}, ${dtype} on ${device}, ${layout} layout`),
    table(["kind", "backend", "how", "of"], rows),
    ...list("Needs", needs), ...list("Passed over", passed), ...list("Would be faster", plan.faster),
    make("details", {}, make("summary", {}, "As it is logged"), make("pre", {}, plan.explained)),
  ];
}

function options(choice) {
  const given = Object.entries(choice.options).filter(([, value]) => value !== null);
  return given.length ? ` (${given.map(([name, value]) => `${name}=${value}`).join(", ")})` : "";
}

function list(title, lines) {
  if (!lines.length) return [];
  return [make("h3", {}, title), make("ul", {}, ...lines.map((line) => make("li", {}, line)))];
}
