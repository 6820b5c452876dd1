// The conversation: turns of a question and its answer.

import { Refusal, stream } from "./api.js";
import { Answer } from "./answer.js";
import { byId, make } from "./dom.js";
import { asked, systemMessage } from "./settings.js";

const turns = []; // { question, answer }
const empty = byId("empty");
let stopping = null; // an AbortController while an answer comes

/** Connect the buttons; `ended` is called after each answer, with what was wrong, if anything was. */
export function start(ended) {
  const question = byId("question");
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = question.value.trim();
    if (!text || stopping) return;
    const fields = asked();
    if (!fields) return;
    question.value = "";
    turns.push({ question: text });
    byId("turns").append(make("article", { class: "asked" }, make("h3", {}, "You"), make("p", { class: "text" }, text)));
    answer(fields, ended);
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  });
  byId("stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  byId("again").addEventListener("click", () => {
    const fields = asked();
    if (!fields || stopping || !turns.length) return;
    turns.at(-1).answer.element.remove();
    answer(fields, ended);
  });
  byId("clear").addEventListener("click", () => {
    turns.length = 0;
    byId("turns").replaceChildren(empty);
    buttons();
    question.focus();
  });
}

const stop = () => stopping?.abort();

/** The conversation as a request has it; earlier questions without an answer are left out. */
function messages() {
  const found = systemMessage() ? [{ role: "system", content: systemMessage() }] : [];
  for (const turn of turns.slice(0, -1)) {
    if (!turn.answer.text) continue;
    found.push({ role: "user", content: turn.question }, { role: "assistant", content: turn.answer.text });
  }
  return [...found, { role: "user", content: turns.at(-1).question }];
}

async function answer(fields, ended) {
  const found = new Answer(fields.model), log = scroller(byId("turns"));
  turns.at(-1).answer = found;
  empty.remove();
  byId("turns").append(found.element);
  toEnd(log);
  stopping = new AbortController();
  buttons();
  say("Answering");
  let error = "", wrong = null, low = true;
  try {
    const body = { ...fields, messages: messages(), stream: true, stream_options: { include_usage: true } };
    for await (const chunk of stream("/v1/chat/completions", body, stopping.signal)) {
      low = atEnd(log);
      found.add(chunk);
      if (low) toEnd(log);
    }
  } catch (caught) {
    if (caught.name === "AbortError") found.reason = "stopped";
    else if (caught instanceof Refusal) error = caught.message;
    else error = `The page could not read the answer: ${caught.message}`;
    wrong = caught;
  }
  stopping = null;
  found.end(error);
  if (low) toEnd(log);
  buttons();
  say(error || `Answer: ${found.text}`);
  ended(wrong);
}

/** What scrolls: the conversation, or on a phone the whole page. */
const scroller = (log) => (getComputedStyle(log).overflowY === "auto" ? log : document.scrollingElement);
const atEnd = (log) => log.scrollHeight - log.scrollTop - log.clientHeight < 60;
const toEnd = (log) => { log.scrollTop = log.scrollHeight; };
const say = (text) => { byId("status").textContent = text; };

function buttons() {
  const busy = stopping !== null;
  const held = document.activeElement;
  byId("send").disabled = busy;
  byId("stop").disabled = !busy;
  byId("again").disabled = byId("clear").disabled = busy || !turns.length;
  if (held?.disabled) byId("question").focus(); // a button that is off would lose the keyboard
}
