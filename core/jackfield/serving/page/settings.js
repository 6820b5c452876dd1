// The form of settings: what of it goes into a request.

import { byId, make } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "max_completion_tokens", "seed"];
const ALTERNATIVES = 5;

/** The fields of a request that were set, or null where one is no good; the browser says which. */
export function asked() {
  if (!byId("settings").reportValidity()) return null;
  const found = { model: byId("model").value };
  for (const name of NUMBERS) {
    if (byId(name).value !== "") found[name] = byId(name).valueAsNumber;
  }
  if (byId("decoding").value) found.decoding = byId("decoding").value;
  if (byId("logprobs").checked) Object.assign(found, { logprobs: true, top_logprobs: ALTERNATIVES });
  if (byId("include_report").checked) found.include_report = true;
  return found;
}

export const systemMessage = () => byId("system").value.trim();

/** Offer these values; what was chosen stays chosen while it is among them. */
export function offer(id, values, labels = {}) {
  const select = byId(id), chosen = select.value;
  select.replaceChildren(...values.map((value) => make("option", { value }, labels[value] ?? value)));
  if (values.includes(chosen)) select.value = chosen;
}
