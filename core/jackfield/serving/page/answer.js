// One answer on the page: its text while it comes, and then what was seen of it.

import { make, table } from "./dom.js";

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const visible = (token) => token.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥") || "∅";

export class Answer {
  constructor(model) {
    this.text = "";
    this.element = make("article", { "aria-busy": "true" }, make("h3", {}, model));
    this.shown = this.element.appendChild(make("p", { class: "text" }));
    this.reasoning = null;
    this.tokens = [];
    this.began = performance.now();
    this.first = null;
  }

  /** Take in a chunk of the stream. */
  add(chunk) {
    for (const choice of chunk.choices) {
      const { content, reasoning_content: thought } = choice.delta;
      if (thought) this.#think(thought);
      if (content) {
        this.text += content;
        this.shown.append(content);
      }
      if (content || thought) this.first ??= performance.now();
      if (choice.logprobs) this.tokens.push(...choice.logprobs.content);
      if (choice.finish_reason) this.reason = choice.finish_reason;
    }
    this.usage = chunk.usage ?? this.usage;
    this.report = chunk.jackfield?.reports[0] ?? this.report;
  }

  #think(text) {
    if (!this.reasoning) {
      this.reasoning = make("p", { class: "text" });
      this.shown.before(make("details", { open: "" }, make("summary", {}, "Reasoning"), this.reasoning));
    }
    this.reasoning.append(text);
  }

  /** The answer is over; `error` says why, where something was wrong. */
  end(error = "") {
    this.element.setAttribute("aria-busy", "false");
    if (error) this.element.append(make("p", { class: "error", role: "alert" }, error));
    this.element.append(make("p", { class: "note" }, this.#summary()));
    if (this.tokens.length) this.element.append(this.#probabilities());
    if (this.report) this.element.append(backends(this.report));
  }

  #summary() {
    const seconds = (performance.now() - this.began) / 1000;
    const parts = [{ stop: "ended", length: "cut at its length", stopped: "stopped by you" }[this.reason] ?? this.reason ?? "did not end"];
    if (this.usage) {
      const made = this.usage.completion_tokens;
      parts.push(`${made} tokens after a prompt of ${this.usage.prompt_tokens}`, `${(made / seconds).toFixed(1)} tokens/s`);
    }
    if (this.first) parts.push(`first in ${(this.first - this.began).toFixed(0)} ms`);
    return parts.join(" · ");
  }

  #probabilities() {
    const others = make("div", { "aria-live": "polite" });
    const row = make("div", { class: "tokens" }, ...this.tokens.map((token) => {
      const button = make("button", {
        type: "button", class: "token", "aria-pressed": "false",
        "aria-label": `${token.token}, ${percent(token.logprob)}`,
      }, visible(token.token));
      button.style.setProperty("--sure", Math.exp(token.logprob).toFixed(3));
      button.addEventListener("click", () => {
        for (const one of row.children) one.setAttribute("aria-pressed", String(one === button));
        others.replaceChildren(alternatives(token));
      });
      return button;
    }));
    return make("details", {}, make("summary", {}, `Token by token (${this.tokens.length})`),
      make("p", { class: "note" }, "The stronger the line, the likelier the token was; choose one to see what else could have come."),
      row, others);
  }
}

function alternatives(token) {
  const rows = token.top_logprobs.map((one) => [JSON.stringify(one.token), percent(one.logprob)]);
  if (!token.top_logprobs.some((one) => one.token === token.token)) {
    rows.push([JSON.stringify(token.token), percent(token.logprob)]);
  }
  return table(["token", "probability"], rows, [1]);
}

function backends(report) {
  const ran = Object.values(report).flat().filter((one) => one?.name);
  const rows = ran.map((one) => [one.kind, one.name, one.distribution, one.calls]);
  return make("details", {}, make("summary", {}, "Which backends ran"),
    table(["kind", "backend", "of", "calls"], rows, [3]));
}
