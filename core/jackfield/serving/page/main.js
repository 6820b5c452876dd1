// The page: panels, models and the key; the rest stands in modules of its own.

import { get, key } from "./api.js";
import * as chat from "./chat.js";
import { byId } from "./dom.js";
import * as live from "./live.js";
import * as plan from "./plan.js";
import { offer } from "./settings.js";

/** Ask for a key where the server wants one. */
function refused(error) {
  if (error.status !== 401 || !byId("key-row").hidden) return;
  byId("key-row").hidden = false;
  open("settings-panel", true);
}

function open(id, wanted) {
  byId(id).hidden = !wanted;
  document.querySelector(`[aria-controls="${id}"]`).setAttribute("aria-expanded", String(wanted));
  document.body.classList.toggle("closed", !document.querySelector("aside section:not([hidden])"));
}

async function models() {
  try {
    const { data } = await get("/v1/models");
    offer("model", data.map((model) => model.id));
    await plan.show();
  } catch (error) {
    refused(error);
    byId("plan").textContent = error.message;
  }
}

key.set(key.get()); // what an earlier page of this tab was given
byId("key").value = key.get();
byId("key-row").hidden = !key.get();
byId("key").addEventListener("change", () => {
  key.set(byId("key").value.trim());
  models();
});
byId("settings").addEventListener("submit", (event) => event.preventDefault());
byId("model").addEventListener("change", models);

const wide = matchMedia("(min-width: 55.01rem)").matches;
for (const button of document.querySelectorAll("nav button")) {
  const id = button.getAttribute("aria-controls");
  open(id, wide);
  button.addEventListener("click", () => open(id, byId(id).hidden));
}

chat.start((error) => (error ? refused(error) : plan.show().catch(refused))); // it may have loaded the model
models().then(() => live.start(refused));
